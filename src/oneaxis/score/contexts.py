"""From items to prompts: every item with its options in several contexts.

- `question`: the question in its template; the continuations are the options.
- `premise`: a domain premise of the task ("Answer:") before the same options; `pmi_dc` divides by it
  (Holtzman et al., 2021, arXiv 2104.08315). The first premise is scored for every item, and is the one that is ranked;
  further ones show how much the choice of a premise matters.
- `bos`: no prompt at all, for the unconditional `pmi`: BOS, or EOS where the tokenizer has no BOS, before the options.
- `letter`: the question with its options listed as A., B., ...; the continuations are the letters, and every cyclic
  rotation of the options is one context of its own.
- `content_free`: the letter format with the item's own options, and a text that asks nothing in place of its question
  (contextual calibration, Zhao et al., 2021, arXiv 2102.09690).

White space before an answer belongs to the answer, as tokenizers see it: a prompt ends without a space, and a space
delimits the answer. Where the chat template or `score.answer_prefix` ends in white space, the answer follows at once.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oneaxis.errors import UserError

DELIMITER = " "
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KINDS = ("question", "premise", "bos", "letter", "content_free")
THINK_OPENS, THINK_CLOSES = "<think>", "</think>"


@dataclass(frozen=True)
class Item:
    """A multiple-choice question; `answer` is the index of the right option, the first where several are right."""

    item_id: str
    task: str
    question: str
    options: tuple[str, ...]
    answer: int
    answers: tuple[int, ...] = ()
    """All right options in order; left out, it is (answer,)."""
    topic: str | None = None

    def __post_init__(self) -> None:
        if not self.answers:
            object.__setattr__(self, "answers", (self.answer,))


@dataclass(frozen=True)
class Wording:
    """How questions are put: the same for all items of a run, or turned by season.

    In season 0 every question stands in the first template, with its options in their own order. In season s >= 1 an
    item's template is (its own offset + s) mod the number of templates, and the order of its listed options is drawn
    by (s, item_id): texts that a model has learnt by heart then meet it in another form. The seed of the run plays no
    part, so that two runs of one season are asked the same.
    """

    templates: tuple[str, ...]
    season: int = 0
    answer_prefix: str = ""
    """Stands between prompt and answer: a closed think span, say, so that the answer is scored and not the thought."""
    chat: Callable[[str], str] | None = None
    """A user's message as the chat template has it, up to where the assistant's words begin."""

    def template(self, item: Item) -> str:
        """The template that this item's question stands in."""
        if not self.season:
            return self.templates[0]
        offset = random.Random(f"wording:{item.task}:{item.item_id}").randrange(len(self.templates))
        return self.templates[(offset + self.season) % len(self.templates)]

    def order(self, item: Item) -> tuple[int, ...]:
        """The options in the order in which they are listed."""
        order = list(range(len(item.options)))
        if self.season:
            random.Random(f"order:{self.season}:{item.task}:{item.item_id}").shuffle(order)
        return tuple(order)

    def prompt(self, text: str) -> str:
        """What stands before the answer.

        Raises:
            UserError: when it leaves a think span open, so that the answer would be scored as a thought.
        """
        prompt = (self.chat(text) if self.chat else text) + self.answer_prefix
        if prompt.rfind(THINK_OPENS) > prompt.rfind(THINK_CLOSES):
            raise UserError(
                f"score.answer_prefix={self.answer_prefix!r}: the prompt ends inside a think span, where an answer "
                f"would be scored as a thought; allowed: a text that closes it, such as '\\n{THINK_CLOSES}\\n\\n'"
            )
        return prompt

    @property
    def delimiter(self) -> str:
        """What stands between prompt and answer and counts as the answer's: lm-eval's rule, with and without a chat."""
        if self.answer_prefix:
            return "" if self.answer_prefix != self.answer_prefix.rstrip() else DELIMITER
        return "" if self.chat else DELIMITER


@dataclass(frozen=True)
class Context:
    """One prompt and its continuations, which are scored against each other."""

    item: Item
    kind: str
    """One of KINDS."""
    rotation: int
    prompt: str
    options: tuple[int, ...]
    """The item's option that each continuation stands for."""
    texts: tuple[str, ...]
    """The continuations without the delimiter before them: what characters and bytes are counted on."""
    variant: int = 0
    """Which premise, or which content-free text."""
    delimiter: str = DELIMITER

    @property
    def continuations(self) -> tuple[str, ...]:
        """The continuations as they follow the prompt."""
        return tuple(self.delimiter + text for text in self.texts)

    @property
    def by_letter(self) -> bool:
        """Whether the continuations are letters and not the options' texts."""
        return self.kind in ("letter", "content_free")


def usable(items: Sequence[Item]) -> tuple[list[Item], dict[str, int]]:
    """The items that can be scored, and how many were dropped for which reason.

    An empty option has no probability of its own, one option is no choice, and equal options cannot be told apart.

    Raises:
        UserError: when a right answer is none of the options.
    """
    kept, dropped = [], {"empty_option": 0, "single_option": 0, "repeated_option": 0}
    for item in items:
        if not all(0 <= answer < len(item.options) for answer in (item.answer, *item.answers)):
            raise UserError(
                f"artifacts/prepare_data/items.parquet: item {item.item_id}: answers is {list(item.answers)}; allowed: "
                f"0 to {len(item.options) - 1}"
            )
        if any(not option.strip() for option in item.options):
            dropped["empty_option"] += 1
        elif len(item.options) < 2:
            dropped["single_option"] += 1
        elif len(set(item.options)) < len(item.options):
            dropped["repeated_option"] += 1
        else:
            kept.append(item)
    return kept, dropped


def question_context(item: Item, wording: Wording) -> Context:
    """The question in its template, followed by each option."""
    prompt = wording.prompt(fill(wording.template(item), item.question))
    return _options_context(item, "question", prompt, wording)


def premise_contexts(item: Item, premises: Mapping[str, str | Sequence[str]], wording: Wording) -> list[Context]:
    """The domain premises of the item's task (or of `default`), each followed by each option."""
    return [
        _options_context(item, "premise", wording.prompt(premise), wording, variant)
        for variant, premise in enumerate(premises_of(item.task, premises))
    ]


def premises_of(task: str, premises: Mapping[str, str | Sequence[str]]) -> tuple[str, ...]:
    """The premises of a task: the first is ranked, the others show how much that choice matters.

    Raises:
        UserError: for no premise, an empty or repeated one, or one that ends in white space.
    """
    key = task if task in premises else "default"
    given = premises[key]
    texts = (given,) if isinstance(given, str) else tuple(given)
    if not texts or len(set(texts)) < len(texts) or any(not text or text != text.rstrip() for text in texts):
        raise UserError(
            f"score.premises.{key}={given!r}: allowed: a text, or a list of texts that differ, none of which is empty "
            "or ends in white space, which belongs to the answer"
        )
    return texts


def bos_context(item: Item, wording: Wording) -> Context:
    """The options after no prompt."""
    return _options_context(item, "bos", "", wording)


def _options_context(item: Item, kind: str, prompt: str, wording: Wording, variant: int = 0) -> Context:
    options = tuple(range(len(item.options)))
    return Context(item, kind, 0, prompt, options, item.options, variant, wording.delimiter)


def letter_contexts(item: Item, wording: Wording) -> list[Context]:
    """All n cyclic rotations of the options, listed under the question; rotation 0 is the order of the wording.

    At rotation r the letter with index j stands for the option at place (j + r) mod n of that order.
    """
    order = wording.order(item)
    return [_listed(item, "letter", item.question, turned(order, r), wording, rotation=r) for r in range(len(order))]


def content_free_contexts(item: Item, texts: Sequence[str], wording: Wording) -> list[Context]:
    """The list of rotation 0 under each content-free text."""
    order = wording.order(item)
    return [_listed(item, "content_free", text, order, wording, variant=place) for place, text in enumerate(texts)]


def turned(order: Sequence[int], rotation: int) -> tuple[int, ...]:
    """The order, begun at place `rotation`."""
    return (*order[rotation:], *order[:rotation])


def _listed(
    item: Item,
    kind: str,
    question: str,
    shown: Sequence[int],
    wording: Wording,
    *,
    rotation: int = 0,
    variant: int = 0,
) -> Context:
    num = len(item.options)
    if num > len(LETTERS):
        raise UserError(f"item {item.item_id} has {num} options; allowed in the letter format: {len(LETTERS)} at most")
    listed = "".join(f"\n{LETTERS[letter]}. {item.options[option]}" for letter, option in enumerate(shown))
    prompt = wording.prompt(fill(wording.template(item), question + listed))
    return Context(item, kind, rotation, prompt, tuple(shown), tuple(LETTERS[:num]), variant, wording.delimiter)


def fill(template: str, question: str) -> str:
    """The template with the question in it.

    Raises:
        UserError: when the template names a field that does not exist.
    """
    try:
        return template.format(question=question)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"score.question_template={template!r}: {error}; allowed: {{question}}, and braces doubled elsewhere"
        ) from error


def choose(items: Sequence[Item], purpose: str, per_task: int, seed: int) -> list[Item]:
    """At most `per_task` items of each task, drawn by seed for this purpose, in the order of `items`."""
    chosen: set[tuple[str, str]] = set()
    for task in sorted({item.task for item in items}):
        ids = sorted(item.item_id for item in items if item.task == task)
        drawn = random.Random(f"{purpose}:{task}:{seed}").sample(ids, min(per_task, len(ids)))
        chosen.update((task, item_id) for item_id in drawn)
    return [item for item in items if (item.task, item.item_id) in chosen]


def all_contexts(
    items: Sequence[Item],
    *,
    wording: Wording,
    premises: Mapping[str, str | Sequence[str]],
    controls_per_task: int = 0,
    letters_per_task: int = 0,
    content_free: Sequence[str] = (),
    seed: int = 0,
) -> list[list[Context]]:
    """Every context of every item, in the order of KINDS: one list per item.

    Args:
        items: what to ask.
        wording: how to ask it.
        premises: per task, `default` for the others.
        controls_per_task: items of each task that are also scored after further premises and after no prompt.
        letters_per_task: items of each task that are also asked by letter.
        content_free: texts in place of the question, for the items that are asked by letter.
        seed: draws the items of the last three.
    """
    controls = set(choose(items, "controls", controls_per_task, seed))
    lettered = set(choose(items, "letter", letters_per_task, seed))
    contexts = []
    for item in items:
        own = [question_context(item, wording), *premise_contexts(item, premises, wording)]
        if item in controls:
            own.append(bos_context(item, wording))
        else:
            own = own[:2]
        if item in lettered:
            own += letter_contexts(item, wording)
            own += content_free_contexts(item, content_free, wording)
        contexts.append(own)
    return contexts
