"""The engine's Prometheus page as a flat mapping.

A sample's key is its name with its labels in sorted order, as Prometheus writes them:
`vllm:num_requests_running{engine="0",model_name="oneaxis"}`.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from oneaxis.errors import RunError


def parse_metrics(text: str, where: str = "/metrics") -> dict[str, float]:
    """Every sample of a Prometheus text page, by `name{label="value",...}`.

    Args:
        where: the page's address, for errors.

    Raises:
        RunError: when it is no such page.
    """
    return {sample_key(name, labels): value for name, labels, value in _samples(text, where)}


def _samples(text: str, where: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, float(sample.value)
    except (ValueError, LookupError, OverflowError) as error:
        begins = " ".join(text[:200].split())[:100]
        raise RunError(f"{where} is no page of Prometheus metrics, it begins {begins!r}: {error}") from error


def sample_key(name: str, labels: Mapping[str, str]) -> str:
    """The key of a sample: labels sorted, values quoted as in the text format."""
    if not labels:
        return name
    quoted = (f'{key}="{_escape(value)}"' for key, value in sorted(labels.items()))
    return f"{name}{{{','.join(quoted)}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def metric_total(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the samples called `name` whose labels include `labels` (over engines, models, sources ...).

    Raises:
        KeyError: when there is no such sample: a counter that is missing must not read as zero.
    """
    wanted = [f'{key}="{_escape(value)}"' for key, value in labels.items()]
    values = [
        value
        for key, value in metrics.items()
        if key.partition("{")[0] == name and all(f"{{{want}" in key or f",{want}" in key for want in wanted)
    ]
    if not values:
        raise KeyError(f"no metric {name} with {labels}")
    return sum(values)


def info_labels(text: str, name: str, where: str = "/metrics") -> dict[str, str]:
    """Labels of the first sample called `name`: how vLLM reports its cache configuration.

    Raises:
        RunError: as `parse_metrics`.
    """
    return next((dict(labels) for found, labels, _ in _samples(text, where) if found == name), {})
