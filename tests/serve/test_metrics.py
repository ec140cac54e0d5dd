"""Prometheus text to a flat mapping; the text is laid out by hand."""

import pytest

from oneaxis.errors import RunError
from oneaxis.serve.metrics import info_labels, metric_total, parse_metrics

PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{source="local_compute",engine="0"} 70.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{cache_dtype="auto",kv_cache_size_tokens="46592"} 1.0
# TYPE process_open_fds gauge
process_open_fds 34.0
# TYPE odd gauge
odd{path="a\\"b,c=\\\\"} 1.5
"""


def test_keys_are_names_with_sorted_labels() -> None:
    metrics = parse_metrics(PAGE)
    assert metrics['vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"}'] == 70.0
    assert metrics["process_open_fds"] == 34.0
    assert metrics['odd{path="a\\"b,c=\\\\"}'] == 1.5
    assert len(metrics) == 6


def test_totals_sum_over_the_labels_that_are_not_named() -> None:
    metrics = parse_metrics(PAGE)
    assert metric_total(metrics, "vllm:prompt_tokens_by_source_total") == 205.0
    assert metric_total(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 77.0
    assert metric_total(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute", engine="1") == 7.0


def test_a_missing_counter_is_not_zero() -> None:
    with pytest.raises(KeyError, match="no metric vllm:nothing"):
        metric_total(parse_metrics(PAGE), "vllm:nothing")


def test_the_cache_configuration_is_in_the_labels() -> None:
    assert info_labels(PAGE, "vllm:cache_config_info") == {"cache_dtype": "auto", "kv_cache_size_tokens": "46592"}
    assert info_labels(PAGE, "vllm:other") == {}


@pytest.mark.parametrize("page", ["<html>a b</html>", "x{a=", "x 1 2 3 y", "\x00", f"x {'9' * 400}"])
def test_a_page_of_something_else_is_said_with_its_address(page: str) -> None:
    with pytest.raises(RunError, match=r"^http://h/metrics is no page of Prometheus metrics, it begins '"):
        parse_metrics(page, "http://h/metrics")
