"""A tiny random model as `.tflite` files of both forms that litert-torch writes, for tests of the LiteRT drafter.

    python -m tests.tools.tiny_litert

makes them again, where litert-torch 0.10 is installed (docs/litert.md). They hold the same weights: `masked.tflite` has
the mask as an input and its slots behind the heads, `plain.tflite` neither; `quantised.tflite` is the first in int8.
`logits.npy`, [ids, width], is what transformers computes for IDS.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.tools import tiny_models
from tools.export import sources, write

HERE = Path(__file__).parent / "litert"
SLOTS = {"masked": 256, "plain": 96}
LENGTHS = (4, 16)
SHAPE = {"hidden_size": 16, "intermediate_size": 32}
IDS = [1, 30, 99, 7, 205, 44, 18, 250, 3, 3, 61, 140]


def source(where: Path) -> sources.Source:
    """The model that was converted, for its tokenizer."""
    return sources.read(str(tiny_models.directory(where / "hf", "llama", **SHAPE)))


def drafter(where: Path, form: str) -> Path:
    """A directory that the LiteRT drafter loads."""
    write.write_litert(source(where), HERE / f"{form}.tflite", where / "out")
    return where / "out"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        source(Path(work))
        _logits(Path(work, "hf"))
        _masked(Path(work, "hf"), Path(work))
        _plain(Path(work, "hf"), Path(work))
        _quantised()


def _logits(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([IDS])).logits[0]
    np.save(HERE / "logits.npy", found.numpy())


def _masked(model: Path, work: Path) -> None:
    from tools.export import litert

    litert.PREFILL_LENGTHS = LENGTHS
    _without_names(litert.convert(model, work / "masked", "none", SLOTS["masked"]), HERE / "masked.tflite")


def _plain(model: Path, work: Path) -> None:
    """By the layers that litert-torch calls its generative API, which most published files were made with."""
    from litert_torch.generative.layers import model_config as cfg
    from litert_torch.generative.utilities import converter, export_config, model_builder
    from transformers import AutoConfig

    facts = AutoConfig.from_pretrained(model)
    norm = cfg.NormalizationConfig(type=cfg.NormalizationType.RMS_NORM, epsilon=facts.rms_norm_eps)
    attention = cfg.AttentionConfig(
        num_heads=facts.num_attention_heads,
        head_dim=facts.hidden_size // facts.num_attention_heads,
        num_query_groups=facts.num_key_value_heads,
        rotary_base=10000,
        rotary_percentage=1.0,
    )
    feed_forward = cfg.FeedForwardConfig(
        type=cfg.FeedForwardType.GATED,
        activation=cfg.ActivationConfig(cfg.ActivationType.SILU),
        intermediate_size=facts.intermediate_size,
    )
    block = cfg.TransformerBlockConfig(
        attn_config=attention,
        ff_config=feed_forward,
        pre_attention_norm_config=norm,
        post_attention_norm_config=norm,
    )
    config = cfg.ModelConfig(
        vocab_size=facts.vocab_size,
        num_layers=facts.num_hidden_layers,
        max_seq_len=facts.max_position_embeddings,
        embedding_dim=facts.hidden_size,
        block_configs=block,
        final_norm_config=norm,
    )
    built = model_builder.build_decoder_only_model(
        checkpoint_path=str(model),
        config=config,
        tensor_names=model_builder.TENSOR_NAMES,
        model_class=model_builder.DecoderOnlyModel,
        mask_cache_size=SLOTS["plain"],
    )
    converter.convert_to_tflite(
        built,
        output_path=str(work),
        output_name_prefix="plain",
        prefill_seq_len=list(LENGTHS),
        kv_cache_max_len=SLOTS["plain"],
        quantize="none",
        export_config=export_config.ExportConfig(),
    )
    (made,) = work.glob("plain*.tflite")
    _without_names(made, HERE / "plain.tflite")


def _quantised() -> None:
    from ai_edge_quantizer import quantizer, recipe

    made = quantizer.Quantizer(str(HERE / "masked.tflite"))
    made.load_quantization_recipe(recipe.dynamic_wi8_afp32())
    made.quantize().export_model(str(HERE / "quantised.tflite"), overwrite=True)


def _without_names(made: Path, out: Path) -> None:
    """Tensors are called by the path of their module, which would be most of so small a file."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(made.read_bytes(), 0)
    for place, graph in enumerate(model.subgraphs):
        for number, tensor in enumerate(graph.tensors):
            tensor.name = f"{place}.{number}"  # the quantiser asks for names that are unique in the file
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    out.write_bytes(builder.Output())


if __name__ == "__main__":
    main()
