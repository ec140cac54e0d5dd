"""From items to prompts: every item with its options in up to three contexts.

- `question`: the question in its template; the continuations are the options.
- `premise`: the domain premise of the task ("Answer:") before the same options; `pmi_dc` divides by it
  (Holtzman et al., 2021, arXiv 2104.08315).
- `letter`: the question with its options listed as A., B., ...; the continuations are the letters, and every cyclic
  rotation of the options is one context of its own.

A prompt never ends in white space: the space before an answer belongs to the answer, as tokenizers see it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oneaxis.errors import UserError

DELIMITER = " "
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Item:
    """A multiple-choice question with one right option (`answer` is its index)."""

    item_id: str
    task: str
    question: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Context:
    """One prompt and its continuations, which are scored against each other."""

    item: Item
    kind: str
    """question, premise or letter."""
    rotation: int
    prompt: str
    options: tuple[int, ...]
    """The item's option that each continuation stands for."""
    texts: tuple[str, ...]
    """The continuations without the delimiter before them: what characters and bytes are counted on."""

    @property
    def continuations(self) -> tuple[str, ...]:
        """The continuations as they follow the prompt."""
        return tuple(DELIMITER + text for text in self.texts)


def usable(items: Sequence[Item]) -> tuple[list[Item], dict[str, int]]:
    """The items that can be scored, and how many were dropped for which reason.

    An empty option has no probability of its own, and one option is no choice.
    """
    kept, dropped = [], {"empty_option": 0, "single_option": 0}
    for item in items:
        assert 0 <= item.answer < len(item.options), f"item {item.item_id}: answer {item.answer}"
        if any(not option.strip() for option in item.options):
            dropped["empty_option"] += 1
        elif len(item.options) < 2:
            dropped["single_option"] += 1
        else:
            kept.append(item)
    return kept, dropped


def question_context(item: Item, template: str) -> Context:
    """The question in its template, followed by each option."""
    options = tuple(range(len(item.options)))
    return Context(item, "question", 0, fill(template, item.question), options, item.options)


def premise_context(item: Item, premises: Mapping[str, str]) -> Context:
    """The domain premise of the item's task (or `default`), followed by each option."""
    key = item.task if item.task in premises else "default"
    premise = premises[key]
    if not premise or premise != premise.rstrip():
        raise UserError(
            f"score.premises.{key}={premise!r}: allowed: a text that does not end in white space, "
            "which belongs to the answer"
        )
    return Context(item, "premise", 0, premise, tuple(range(len(item.options))), item.options)


def letter_contexts(item: Item, template: str) -> list[Context]:
    """All n cyclic rotations of the options, listed under the question; rotation 0 is the item's own order.

    At rotation r the letter with index j stands for option (j + r) mod n.
    """
    num = len(item.options)
    if num > len(LETTERS):
        raise UserError(f"item {item.item_id} has {num} options; allowed in the letter format: {len(LETTERS)} at most")
    contexts = []
    for rotation in range(num):
        shown = tuple((letter + rotation) % num for letter in range(num))
        listed = "".join(f"\n{LETTERS[letter]}. {item.options[option]}" for letter, option in enumerate(shown))
        prompt = fill(template, item.question + listed)
        contexts.append(Context(item, "letter", rotation, prompt, shown, tuple(LETTERS[:num])))
    return contexts


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


def choose_for_letters(items: Sequence[Item], per_task: int, seed: int) -> list[Item]:
    """At most `per_task` items of each task for the letter format, drawn by seed, in the order of `items`."""
    chosen: set[tuple[str, str]] = set()
    for task in sorted({item.task for item in items}):
        ids = sorted(item.item_id for item in items if item.task == task)
        drawn = random.Random(f"letter:{task}:{seed}").sample(ids, min(per_task, len(ids)))
        chosen.update((task, item_id) for item_id in drawn)
    return [item for item in items if (item.task, item.item_id) in chosen]


def all_contexts(
    items: Sequence[Item], *, template: str, premises: Mapping[str, str], letter_items_per_task: int, seed: int
) -> list[Context]:
    """Every context of every item: questions, premises, then letters."""
    contexts = [question_context(item, template) for item in items]
    contexts += [premise_context(item, premises) for item in items]
    for item in choose_for_letters(items, letter_items_per_task, seed):
        contexts += letter_contexts(item, template)
    return contexts
