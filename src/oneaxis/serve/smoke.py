"""A few greedy answers from a running engine, and whether they make sense as answers.

This is no measure of quality: it tells an engine that answers from one that returns errors, nothing, or one token for
ever (what a broken KV cache or a wrong scale does), and checks the server's token counts against the token ids.
"""

from pathlib import Path
from typing import Any

from oneaxis.errors import RunError
from oneaxis.serve.endpoint import Endpoint

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
)
QUESTION = "Name three colours."
MAX_TOKENS = 16


def smoke_answers(engine: Endpoint, checkpoint: Path) -> list[dict[str, Any]]:
    """One greedy completion for each prompt, and one chat answer when the tokenizer has a chat template.

    Returns:
        For each: `{kind, prompt, text, finish_reason, usage: {prompt_tokens, completion_tokens}, sane, problems}`.

    Raises:
        RunError: when the engine answers with an error or not at all, when its token counts are wrong, or when every
            answer is empty.
    """
    greedy = {"model": engine.model_name, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    answers = []
    for prompt in PROMPTS:
        reply = engine.post("/v1/completions", greedy | {"prompt": prompt})
        answers.append(read_answer("completion", prompt, reply))
    if has_chat_template(checkpoint):
        messages = [{"role": "user", "content": QUESTION}]
        reply = engine.post("/v1/chat/completions", greedy | {"messages": messages})
        answers.append(read_answer("chat", QUESTION, reply))
    if not any(answer["text"].strip() for answer in answers):
        raise RunError(f"the engine's answers are all empty: {len(answers)} greedy requests gave no text; "
                       f"{engine.where()}")  # fmt: skip
    return answers


def has_chat_template(checkpoint: Path) -> bool:
    """Whether the checkpoint's tokenizer can render a chat."""
    if (checkpoint / "chat_template.jinja").is_file():
        return True
    tokenizer = checkpoint / "tokenizer_config.json"
    return tokenizer.is_file() and '"chat_template"' in tokenizer.read_text(encoding="utf-8")


def read_answer(kind: str, prompt: str, reply: dict[str, Any]) -> dict[str, Any]:
    """One answer from the server's reply (completion or chat, with `return_token_ids`).

    Raises:
        RunError: when the reply has no answer, or its usage contradicts its token ids.
    """
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        text = (choice["message"]["content"] if kind == "chat" else choice["text"]) or ""
        token_ids, counted = list(choice["token_ids"]), int(usage["completion_tokens"])
        prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
        num_prompt, reason = int(usage["prompt_tokens"]), str(choice["finish_reason"])
        if not isinstance(text, str):
            raise TypeError("a text")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(f"the engine's answer to {prompt!r} lacks {error}: {str(reply)[:200]}") from error
    if counted != len(token_ids) or (prompt_ids is not None and num_prompt != len(prompt_ids)):
        raise RunError(
            f"the engine's usage for {prompt!r} is wrong: completion_tokens={counted} for {len(token_ids)} token ids, "
            f"prompt_tokens={num_prompt} for {len(prompt_ids or [])}"
        )
    problems = []
    if not text.strip():
        problems.append("empty")
    if len(token_ids) > 3 and len(set(token_ids)) == 1:
        problems.append("one token repeated")
    if reason == "length" and counted != MAX_TOKENS:
        problems.append(f"finish_reason length after {counted} of {MAX_TOKENS} tokens")
    if reason not in ("length", "stop"):
        problems.append(f"finish_reason {reason}")
    return {
        "kind": kind,
        "prompt": prompt,
        "text": text,
        "finish_reason": reason,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": counted},
        "sane": not problems,
        "problems": problems,
    }
