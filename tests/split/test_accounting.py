"""The account of a split deployment, from counters made up here, worked by hand."""

from collections.abc import Mapping
from typing import Any

import pytest

from oneaxis.split.accounting import COUNTERS, account, decode_slots, gained, read


def counted(**values: float) -> dict[str, float]:
    return dict.fromkeys(COUNTERS, 0.0) | values


# Four requests of 100 prompt tokens and 11 answer tokens: 50 ms of prefill, 20 ms to the second engine's first token,
# 100 ms of decoding (10 gaps of 10 ms). 23,040 bytes a token are those of SmolLM2-135M in BF16.
PREFILL = counted(finished=4, e2e_s=0.2)
DECODE = counted(
    prompt_tokens=400, transferred_tokens=400, finished=4, ttft_s=0.08, decode_s=0.4, e2e_s=0.48, transfers=4,
    transfer_s=0.02, transferred_bytes=400 * 23040,
)  # fmt: skip
ROWS = [{"prefill_s": 0.051, "decode_s": 0.122, "equal": True, "prompt_tokens": 100}] * 4


def made(
    rows: Any = ROWS, prefill: Mapping[str, float] = PREFILL, decode: Mapping[str, float] = DECODE, **more: Any
) -> dict[str, Any]:
    given: dict[str, Any] = {"transfers": decode, "rate_rps": 2.0, "output_tokens": 11, "running_mean": 0.2,
                             "max_num_seqs": 8} | more  # fmt: skip
    return account(rows, prefill, decode, **given)


def test_slots_by_littles_law() -> None:
    assert decode_slots(8, 128, 0.0104) == pytest.approx(10.6, abs=0.06)
    assert decode_slots(8, 128, 0.0070) == pytest.approx(7.2, abs=0.04)


def test_phases_of_a_clean_run() -> None:
    found = made()
    assert found["invalid"] == []
    assert found["warnings"] == []
    phases = ("prefill_ms", "first_token_ms", "decode_ms", "transfer_ms", "tpot_ms", "client_ms", "server_ms")
    assert [found[name] for name in phases] == pytest.approx([50, 20, 100, 5, 10, 173, 170])
    assert (found["transferred_share"], found["bytes_per_token"], found["answers_equal"]) == (1.0, 23040.0, 1.0)
    # 2 a second x 11 tokens x 10 ms.
    assert found["decode_slots"] == pytest.approx(0.22)
    assert found["slots_share"] == pytest.approx(0.0275)


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        (DECODE | {"transferred_tokens": 0.0, "transferred_bytes": 0.0}, "no token of keys and values was transferred"),
        (DECODE | {"transferred_tokens": 200.0}, "only 50% of the prompt tokens were transferred"),
        (DECODE | {"transferred_bytes": 0.0}, "counts transferred tokens and no bytes"),
        (DECODE | {"failed_transfers": 1.0}, "1 transfers failed"),
        (DECODE | {"finished": 3.0}, "4 requests were sent, 4 ended at the prefilling engine and 3 at the decoding"),
        (DECODE | {"e2e_s": 0.2}, "the account has a hole: 173.0 ms a request by the client, 100.0 ms by the servers"),
    ],
)
def test_what_is_no_split_deployment_is_invalid(decode: dict[str, float], reason: str) -> None:
    assert any(reason in said for said in made(decode=decode)["invalid"])


def test_other_answers_and_full_slots_are_said() -> None:
    rows = [*ROWS[:3], ROWS[3] | {"equal": False}]
    found = made(rows, rate_rps=80.0)
    assert found["warnings"] == ["25% of the greedy answers differ from those of one engine",
                                 "8.8 decode slots of 8 are held: over 80%"]  # fmt: skip
    assert found["invalid"] == []


def test_counters_are_read_by_name_and_label_and_absent_ones_are_none() -> None:
    page = {
        'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"}': 7.0,
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"}': 9.0,
        'vllm:prompt_tokens_total{engine="0"}': 16.0,
    }
    values = read(page)
    assert (values["transferred_tokens"], values["prompt_tokens"], values["transfer_s"]) == (7.0, 16.0, 0.0)
    assert gained(values, values | {"transferred_tokens": 10.0})["transferred_tokens"] == 3.0
