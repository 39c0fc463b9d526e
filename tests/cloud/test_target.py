"""What is loaded, what is refused at start, and what decides the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloud.engines import rows  # noqa: E402
from cloud.engines.model import load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.product import PanelLinear, has_panels  # noqa: E402
from cloud.engines.ragged import Span  # noqa: E402
from cloud.engines.target import read_manifest, target_id  # noqa: E402
from cloud.engines.torch_engine import load  # noqa: E402
from protocol.errors import ConfigError, ModelError, NumericsError  # noqa: E402
from tests.cloud.tiny_target import make_target, prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def test_tiles_are_cut_where_a_larger_call_has_other_bits(targets: dict[str, Path]) -> None:
    """The bits are those of single tiles, whether or not the kernels let several tiles share a call."""
    numerics = Numerics(mode="exact", dtype="bfloat16")
    texts = prompts(90, 33)

    def logits(shared: bool) -> Any:
        forward = load_model(targets["llama"], "bfloat16", numerics)
        for module in forward.model.modules():
            if isinstance(module, rows.TiledLinear) and not shared:
                module.spans = ()
        spans = [Span(forward.new_slab(90, 0), 0, 0, 90, ()), Span(forward.new_slab(33, 0), 90, 0, 33, ())]
        return forward(spans, texts[0] + texts[1], range(123))

    assert torch.equal(logits(True), logits(False))


def test_spans_are_found_that_bfloat16_would_hide() -> None:
    """Of two orders of summation most results round to the same bfloat16, so a careless probe takes them for one."""
    linear = torch.nn.Linear(1536, 256, dtype=torch.bfloat16)
    tiled = rows.TiledLinear(linear, 8)
    with torch.inference_mode():
        rows.find_spans([tiled])
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(128, 1536).to(torch.bfloat16)
            singly = torch.cat([tiled.product(part) for part in x.split(8)])
            for count in (1, 8, 13, 24, 40, 56, 64, 100, 128):
                assert torch.equal(tiled(x[:count]), singly[:count]), count


def test_a_pin_that_this_machine_cannot_honour_names_both_values(targets: dict[str, Path]) -> None:
    info = load(targets["llama"], Numerics(mode="exact")).info
    *_, isa, library, bits = info.numerics.split("-")
    again = Numerics(mode="exact", isa=isa, torch=library.removeprefix("torch"), bits=bits)
    assert load(targets["llama"], again).info == info
    for pin, here in (("isa", isa), ("torch", library.removeprefix("torch")), ("bits", bits)):
        with pytest.raises(NumericsError, match=f"pinned to 'other'.*{here}"):
            load(targets["llama"], Numerics(mode="exact", **{pin: "other"}))


def test_other_tiles_make_another_target(targets: dict[str, Path]) -> None:
    ids = {
        load(targets["llama"], numerics).info.id
        for numerics in (Numerics(), Numerics(mode="exact"), Numerics(mode="exact", row_tile=16))
    }
    assert len(ids) == 3


@pytest.mark.parametrize(("layer", "dtype"), [(rows.TiledLinear, "bfloat16"), (PanelLinear, "float32")])
def test_exact_numerics_refuse_a_layer_that_mixes_rows(
    layer: Any, dtype: str, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if layer is PanelLinear and not has_panels(torch.float32):
        pytest.skip("no C compiler")
    honest = layer.forward

    def mixed(self: Any, x: Any) -> Any:
        return honest(self, x) + 1e-2 * x.sum()

    monkeypatch.setattr(layer, "forward", mixed)
    with pytest.raises(NumericsError, match="differ from those alone"):
        load(targets["llama"], Numerics(mode="exact", dtype=dtype))


def test_a_model_that_attends_on_its_own_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    directory = make_target(tmp_path, "llama")
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ModelError, match="sliding_window"):
        load(directory)


def test_a_damaged_directory_is_named(targets: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no manifest\.json"):
        load(tmp_path)
    directory = make_target(tmp_path, "llama")
    manifest = (directory / "manifest.json").read_bytes()
    (directory / "manifest.json").write_bytes(manifest.replace(b'"target"', b'"drafter"'))
    with pytest.raises(ModelError, match="'drafter'"):
        load(directory)
    (directory / "manifest.json").write_bytes(manifest[:-9])
    with pytest.raises(ModelError, match="cannot be read"):
        load(directory)
    (directory / "manifest.json").write_bytes(manifest)
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(directory, verify_weights=True)
    (directory / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(directory)
    (directory / "tokenizer.json").write_text("{} ")
    with pytest.raises(ModelError, match=r"tokenizer\.json.*digest"):
        read_manifest(directory)


@pytest.mark.parametrize("wrong", [{"mode": "quick"}, {"dtype": "int8"}, {"row_tile": 1}, {"key_multiple": 40}])
def test_a_setting_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        Numerics(**wrong)


def test_target_ids_fit_into_a_topic_level() -> None:
    id = target_id("Qwen/Qwen2.5 Coder+#" * 5, "aa", "bb", 1, "fast-float32")
    name, _, digest = id.rpartition("-")
    assert len(name) <= 48 and len(digest) == 12
    assert all(c.isascii() and (c.isalnum() or c in "-_") for c in id)
    others = [("ab", "bb", 1, "fast-float32"), ("aa", "b", 1, "fast-float32"), ("aa", "bb", 2, "fast-float32")]
    assert len({id, *(target_id("Qwen/Qwen2.5 Coder+#" * 5, *facts) for facts in others)}) == 4
