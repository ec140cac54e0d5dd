"""What the installed vLLM, xgrammar and llguidance make of schemas and answers: the oracle of OV1xx and OV20x.

Run as a program, since vLLM sets up its process as it is imported. Reads a JSON object from stdin, writes one:

    cases     [{schema, answers}] -> {auto, xgrammar, guidance: the backend that vLLM takes it to, or "400 ..." with the
              reason; accepts: whether each answer is accepted by the backend that `auto` chose}
    compiles  schemas -> what xgrammar says against each; "" if it compiles
    spaces    answers to one schema -> whether free and compact whitespace accept them, by xgrammar and by llguidance
    keys      structured_outputs -> what vLLM hands to a backend
    requests  chat requests -> the structured_outputs that vLLM reads in them
    penalties {logits, prompt, output, presence, frequency, repetition} -> the logits that vLLM samples from
"""

import json
import logging
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import llguidance
import torch
import xgrammar
from outlines_core.json_schema import build_regex_from_schema
from transformers import PreTrainedTokenizerFast
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.request import get_structured_output_key
from xgrammar.testing import _is_grammar_accept_string

from tests.serve.tiny import byte_tokenizer

BYTES = llguidance.LLTokenizer("byte")


def route(schema: dict, backend: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The backend to which vLLM takes a schema, by its own check of a request."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    try:
        params._validate_structured_outputs(
            SimpleNamespace(is_diffusion=False), StructuredOutputsConfig(backend=backend), tokenizer
        )
    except (VLLMValidationError, ValueError) as error:
        return f"400 {error}"
    return params.structured_outputs._backend


def by_xgrammar(schema: dict, answer: str, **how: object) -> bool:
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(json.dumps(schema), **how), answer)


def against(schema: dict) -> str:
    """Why xgrammar does not compile a schema; empty: it does."""
    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except RuntimeError as error:
        return str(error)
    return ""


def by_guidance(schema: dict, answer: str, free: bool = True) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": free}
    )  # fmt: skip
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    tokens = BYTES.tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def by_outlines(schema: dict, answer: str) -> bool:
    return re.fullmatch(build_regex_from_schema(json.dumps(schema)), answer) is not None


ACCEPT = {"xgrammar": by_xgrammar, "guidance": by_guidance, "outlines": by_outlines}


def main() -> None:
    """Answer what stdin asks."""
    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(Path(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    said: dict = {"cases": []}
    for case in asked["cases"]:
        found = {name: route(case["schema"], name, tokenizer) for name in ("auto", "xgrammar", "guidance")}
        accept = ACCEPT.get(found["auto"])
        found["accepts"] = [accept(case["schema"], answer) for answer in case["answers"]] if accept else []
        said["cases"].append(found)
    said["compiles"] = [against(schema) for schema in asked["compiles"]]
    space = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
             "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    said["spaces"] = [
        {
            "free": [by_xgrammar(space, answer), by_guidance(space, answer)],
            "compact": [
                by_xgrammar(space, answer, any_whitespace=False, separators=(",", ":")),
                by_guidance(space, answer, free=False),
            ],
        }
        for answer in asked["spaces"]
    ]
    said["keys"] = [
        [str(part) for part in get_structured_output_key(StructuredOutputsParams(**each))] for each in asked["keys"]
    ]
    said["requests"] = []
    for request in asked["requests"]:
        read = ChatCompletionRequest.model_validate(request).extract_structured_outputs()
        said["requests"].append(None if read is None else read.json)
    said["penalties"] = []
    for each in asked["penalties"]:
        logits = torch.tensor([each["logits"]])
        apply_penalties(
            logits, torch.tensor([each["prompt"]]), torch.tensor([each["output"]]),
            *(torch.tensor([each[name]]) for name in ("presence", "frequency", "repetition")),
        )  # fmt: skip
        said["penalties"].append(logits[0].tolist())
    # vLLM and xgrammar print to stdout as well: the answer is its last line.
    print("\n" + json.dumps(said))


if __name__ == "__main__":
    main()
