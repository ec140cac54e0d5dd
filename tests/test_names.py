"""Names of schemes."""

import pytest

from oneaxis.names import scheme_name
from tests.quantize.checkpoints import scheme


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (scheme(), "int8_dynamic α=0.5"),
        (scheme("w8a8_int8_static", alpha="auto", kv="fp8"), "int8_static α=auto kv=fp8"),
        (scheme("w4a16", [], rounding="gptq"), "w4a16 g32 gptq unsmoothed"),
        (scheme("w4a16", [], symmetric=False, group_size=64), "w4a16 asym g64 unsmoothed"),
        (scheme("w8a8_fp8", []), "fp8 unsmoothed"),
    ],
)
def test_scheme_in_a_few_words(settings, name):
    assert scheme_name(settings.model_dump()) == name


def test_weights_as_they_are():
    assert scheme_name({"kind": "none", "kv": "none"}) == "not quantised"
    assert scheme_name({"kind": "none", "kv": "fp8"}) == "weights as they are kv=fp8"
