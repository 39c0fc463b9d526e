"""The torch engine against transformers itself, on tiny random models and on a real one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cloud.engines import rows, torch_engine  # noqa: E402
from cloud.engines.base import Outcome, Plan, Work  # noqa: E402
from cloud.engines.model import load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.ragged import Span  # noqa: E402
from cloud.engines.target import read_manifest, target_id  # noqa: E402
from cloud.engines.torch_engine import TorchEngine, load  # noqa: E402
from cloud.engines.walk import walk  # noqa: E402
from protocol.errors import ConfigError, ModelError, NumericsError  # noqa: E402
from protocol.sampling import Sampling  # noqa: E402

VOCAB = 500  # of the tokenizer; the model's own is wider
POISON = 499  # its embedding is not a number

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)

Drafter = Callable[[list[int], list[int]], tuple[list[int], list[int]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_target(directory: Path, architecture: str) -> Path:
    """A random model that is sure of nothing and never repeats itself, exported as a target directory."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB + 12,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(architecture, **shape))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0
        model.get_output_embeddings().weight[VOCAB:] *= 9  # would win, were they not cut off
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    manifest = {
        "kind": "target",
        "name": f"tiny {architecture}",
        "architecture": architecture,
        "source": {"made": "here"},
        "weights_digest": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "tokenizer_digest": hashlib.sha256(b"{}").hexdigest(),
        "vocab_size": VOCAB,
        "context": 400,
        "dtype": "float32",
        "chat_template": "",
    }
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return directory


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_target(tmp_path_factory.mktemp(name), name) for name in ("llama", "qwen2")}


@pytest.fixture(scope="module")
def real_target(smollm2: tuple[Path, Path]) -> Path:
    return smollm2[1]


def prompts(*lengths: int, vocab: int = VOCAB - 1) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


def prefill(engine: TorchEngine, key: int, chunk: int = 1000) -> None:
    while engine.pending(key) > 1:
        outcome = engine.step(Plan([Work(key, min(chunk, engine.pending(key) - 1))]))
        assert not outcome.failed


def decode(
    engine: TorchEngine, texts: list[list[int]], sampling: Sampling, new: int, drafter: Drafter
) -> list[list[int]]:
    """Decode all texts together, `new` ids each; drafter(true future or what is known, text) -> (draft, parents)."""
    lengths = [len(text) for text in texts]
    for key, text in enumerate(texts):
        engine.open(key, text, sampling, len(text) + new)
        prefill(engine, key, chunk=11 + key)
    grown = [list(text) for text in texts]
    while True:
        work = []
        for key, text in enumerate(grown):
            if len(text) - lengths[key] < new:
                draft, parents = drafter([key], text)
                work.append(Work(key, 1, draft, parents))
        if not work:
            break
        outcome = engine.step(Plan(work))
        assert not outcome.failed
        for key, ids in outcome.accepted.items():
            grown[key] += ids
            assert engine.pending(key) == 1
    for key in range(len(texts)):
        engine.close(key)
    return [text[length : length + new] for text, length in zip(grown, lengths, strict=True)]


def no_draft(_key: list[int], _text: list[int]) -> tuple[list[int], list[int]]:
    return [], []


def drafters(truth: list[list[int]], texts: list[list[int]]) -> dict[str, Drafter]:
    """Drafters that know what comes, some of the time, in the shapes that a device may send."""
    generator = random.Random(11)

    def future(key: list[int], text: list[int], n: int) -> list[int]:
        done = len(text) - len(texts[key[0]])
        known = truth[key[0]][done : done + n]
        return known + [generator.randrange(VOCAB - 1) for _ in range(n - len(known))]

    def good(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        return future(key, text, 4), [-1, 0, 1, 2]

    def bad(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        return [(id + 1) % (VOCAB - 1) for id in future(key, text, 4)], [-1, 0, 1, 2]

    def half(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        ids = future(key, text, 5)
        return [*ids[:2], (ids[2] + 1) % (VOCAB - 1), *ids[3:]], [-1, 0, 1, 2, 3]

    def tree(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        a, b, c, d = future(key, text, 4)
        wrong = (a + 3) % (VOCAB - 1)
        return [wrong, a, wrong, b, b, c, wrong, d], [-1, -1, 0, 1, 2, 3, 3, 5]

    def random_tree(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        ids = future(key, text, 4)
        size = generator.randrange(1, 9)
        parents = [generator.randrange(-1, i) if i else -1 for i in range(size)]
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        draft = [ids[d] if d < 4 and generator.random() < 0.7 else generator.randrange(VOCAB - 1) for d in depth]
        return draft, parents

    return {"good": good, "bad": bad, "half": half, "tree": tree, "random_tree": random_tree}


def reference_logits(target: Path, ids: Sequence[int]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_ragged_pass_gives_the_logits_of_plain_passes(targets: dict[str, Path], architecture: str, mode: str) -> None:
    forward = load_model(targets[architecture], "float32", Numerics(mode=mode))
    texts = prompts(3, 70, 1, 130)
    spans, ids = [], []
    for text in texts:
        spans.append(Span(forward.new_slab(len(text), 0), len(ids), 0, len(text), ()))
        ids += text
    logits = forward(spans, ids, range(len(ids)))
    for span, text in zip(spans, texts, strict=True):
        found = logits[span.start : span.start + span.rows]
        torch.testing.assert_close(found, reference_logits(targets[architecture], text), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_greedy_decoding_equals_generate(targets: dict[str, Path], architecture: str, mode: str) -> None:
    engine = load(targets[architecture], Numerics(mode=mode))
    texts = prompts(5, 61, 17)
    found = decode(engine, texts, GREEDY, 12, no_draft)
    model = transformers.AutoModelForCausalLM.from_pretrained(targets[architecture], dtype=torch.float32).eval()
    for text, ids in zip(texts, found, strict=True):
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([text]), max_new_tokens=12, do_sample=False, suppress_tokens=list(range(VOCAB, VOCAB + 12))
            )
        assert ids == whole[0, len(text) :].tolist()


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(mode="exact"), Numerics(mode="exact", dtype="bfloat16")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    targets: dict[str, Path], numerics: Numerics, sampling: Sampling
) -> None:
    engine = load(targets["llama"], numerics)
    texts = prompts(9, 58, 30)
    truth = [decode(engine, [text], sampling, 20, no_draft)[0] for text in texts]
    for name, drafter in drafters(truth, texts).items():
        assert decode(engine, texts, sampling, 20, drafter) == truth, name


def test_a_good_draft_is_accepted_whole_and_a_tree_by_its_branch(targets: dict[str, Path]) -> None:
    engine = load(targets["llama"])
    [text] = prompts(20)
    truth = decode(engine, [text], SAMPLED, 12, no_draft)[0]
    known = drafters([truth], [text])
    for name, accepted in (("good", 4), ("half", 2), ("tree", 4), ("bad", 0)):
        engine.open(0, text, SAMPLED, 40)
        prefill(engine, 0)
        outcome = engine.step(Plan([Work(0, 1, *known[name]([0], text))]))
        assert outcome.accepted == {0: truth[: accepted + 1]}, name
        engine.close(0)


class Recorder:
    """Keeps the logits from which each session's tokens were drawn; a session is known by its seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, int], list[Any]] = {}
        choose = torch_engine.choose_rows

        def record(logits: Any, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
            for row, position, sampling in zip(logits, positions, samplings, strict=True):
                self.rows.setdefault((sampling.seed, position), []).append(row.clone())
            return choose(logits, positions, samplings)

        monkeypatch.setattr(torch_engine, "choose_rows", record)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_exact_logits_are_equal_to_the_bit(
    targets: dict[str, Path], architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and row by row, against company, chunks, chains, trees, another order, another thread count, a restart."""
    numerics = Numerics(mode="exact", dtype=dtype)
    engine = load(targets[architecture], numerics)
    text, *others = prompts(50, 3, 90, 64, 21)
    sampling = Sampling(temperature=0.8, seed=99)
    recorder = Recorder(monkeypatch)
    truth = decode(engine, [text], sampling, 20, no_draft)[0]
    plain = {key: rows[0] for key, rows in recorder.rows.items()}
    assert len(plain) == 20

    def check(how: str, engine: TorchEngine, drafter: Drafter, first: bool, company: int) -> None:
        recorder.rows.clear()
        busy = [(1 + i, other) for i, other in enumerate(others[:company])]
        for key, ids in busy:
            engine.open(key, ids, Sampling(temperature=1.0, seed=key), 300)
        engine.open(0, text, sampling, len(text) + 20)
        prefill(engine, 0, chunk=7 if company else 1000)
        grown = list(text)
        while len(grown) < len(text) + 20:
            mine = Work(0, 1, *drafter([0], grown))
            theirs = [Work(key, min(9, engine.pending(key))) for key, _ in busy]
            outcome = engine.step(Plan([mine, *theirs] if first else [*theirs, mine]))
            grown += outcome.accepted[0]
        for key in (0, *(key for key, _ in busy)):
            engine.close(key)
        assert grown[len(text) :][:20] == truth, how
        for key, row in plain.items():
            assert any(torch.equal(row, other) for other in recorder.rows[key]), (how, key)

    kinds = drafters([truth], [text])
    check("in company", engine, no_draft, True, 4)
    for name in ("good", "half", "tree", "random_tree"):
        check(name, engine, kinds[name], False, 0)
    check("random_tree in company", engine, kinds["random_tree"], False, 3)
    restarted = load(targets[architecture], numerics, threads=2)
    assert restarted.info == engine.info
    check("restarted on two threads", restarted, kinds["tree"], True, 2)
    torch.set_num_threads(1)


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


def test_bad_work_fails_alone(targets: dict[str, Path]) -> None:
    engine = load(targets["llama"], max_draft=6)
    [text] = prompts(30)
    expected = decode(engine, [text], GREEDY, 1, no_draft)[0]
    for key in range(10):
        engine.open(key, text, GREEDY, 31)
    engine.open(11, [*text[:5], POISON, 3], GREEDY, 31)
    plan = [
        Work(0, 30),
        Work(1, 31),
        Work(2, 0),
        Work(3, 12, [5], [-1]),
        Work(4, 30, [5, VOCAB], [-1, 0]),
        Work(5, 30, [-1], [-1]),
        Work(6, 30, [5, 6], [-1, 1]),
        Work(7, 30, [5, 6], [-1]),
        Work(8, 30, [5] * 7, range(-1, 6)),
        Work(11, 7),
        Work(77, 1),
        Work(0, 30),
        Work(9, 30, expected, [-1]),
    ]
    outcome = engine.step(Plan(plan))
    assert set(outcome.failed) == {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 77}
    assert outcome.accepted[9][:1] == expected and len(outcome.accepted[9]) == 2
    for key in (1, 2, 3, 4, 5, 6, 7, 8):
        assert engine.pending(key) == 30
        assert engine.step(Plan([Work(key, 30)])).accepted == {key: expected}


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_logits_that_are_not_numbers_fail_their_session_alone(targets: dict[str, Path], mode: str) -> None:
    engine = load(targets["llama"], Numerics(mode=mode))
    [text] = prompts(30)
    expected = decode(engine, [text], SAMPLED, 3, no_draft)[0]
    engine.open(0, text, SAMPLED, 40)
    engine.open(1, [*text[:7], POISON], SAMPLED, 40)
    outcome = engine.step(Plan([Work(1, 8), Work(0, 30)]))
    assert list(outcome.failed) == [1] and outcome.accepted == {0: expected[:1]}
    assert engine.pending(1) == 8
    poisoned_draft = engine.step(Plan([Work(0, 1, [POISON], [-1]), Work(1, 8)]))
    assert set(poisoned_draft.failed) == {0, 1}
    assert engine.step(Plan([Work(0, 1)])).accepted == {0: expected[1:2]}
    assert engine.step(Plan([Work(0, 1)])).accepted == {0: expected[2:3]}


def test_the_kv_budget_is_kept(targets: dict[str, Path]) -> None:
    row = 2 * 2 * 2 * 16 * 4  # layers, keys and values, key heads, head size, bytes
    engine = load(targets["llama"], kv_bytes=row * (108 + 58), max_draft=8)
    assert engine.room(100) and not engine.room(159) and not engine.room(0)
    engine.open(0, [1, 2], GREEDY, 100)
    assert engine.room(50) and not engine.room(51)
    with pytest.raises(ModelError, match="kv_bytes"):
        engine.open(1, [1], GREEDY, 51)
    engine.open(1, [1], GREEDY, 50)
    engine.close(0)
    assert engine.room(100)


@pytest.mark.parametrize(
    ("ids", "length", "names"),
    [([], 9, "0 ids"), ([1, VOCAB], 9, "499"), ([1, -1], 9, "499"), ([1], 401, "400"), ([1, 2, 3], 2, "3 ids")],
)
def test_a_text_that_cannot_be_held_is_refused(
    targets: dict[str, Path], ids: list[int], length: int, names: str
) -> None:
    engine = load(targets["llama"])
    with pytest.raises(ModelError, match=names):
        engine.open(0, ids, GREEDY, length)
    assert engine.step(Plan([])) == Outcome(seconds=pytest.approx(0, abs=1))


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


def test_exact_numerics_refuse_a_layer_that_mixes_rows(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = rows.TiledLinear.forward

    def mixed(self: Any, x: Any) -> Any:
        return honest(self, x) + 1e-4 * x.sum()

    monkeypatch.setattr(rows.TiledLinear, "forward", mixed)
    with pytest.raises(NumericsError, match="differ from those alone"):
        load(targets["llama"], Numerics(mode="exact"))


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


def test_walk_takes_the_branch_that_was_drawn() -> None:
    draft, parents = [5, 6, 7, 8, 9], [-1, -1, 1, 2, 0]
    assert walk([6, 1, 7, 3, 4, 2], draft, parents) == ([6, 7, 3], [1, 2])
    assert walk([4, 1, 7, 3, 4, 2], draft, parents) == ([4], [])
    assert walk([3], [], []) == ([3], [])


def test_real_model_greedy_equals_generate(real_target: Path) -> None:
    engine = load(real_target, Numerics(dtype="float32"))
    texts = prompts(40, 120, 7, vocab=engine.info.vocab_size)
    truth = decode(engine, texts, GREEDY, 16, no_draft)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32).eval()
    for text, ids in zip(texts, truth, strict=True):
        with torch.inference_mode():
            whole = model.generate(torch.tensor([text]), max_new_tokens=16, do_sample=False)[0, len(text) :].tolist()
        assert ids[: len(whole)] == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_model_exact_with_drafts_equals_alone(
    real_target: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(real_target, Numerics(mode="exact", dtype=dtype))
    texts = prompts(60, 124, 9, vocab=engine.info.vocab_size)
    recorder = Recorder(monkeypatch)
    truth = []
    plain: dict[tuple[int, int], list[Any]] = {}
    for text in texts:
        truth.append(decode(engine, [text], SAMPLED, 16, no_draft)[0])
        for (_, position), logits in recorder.rows.items():
            plain[len(text), position] = logits
        recorder.rows.clear()
    assert decode(engine, texts, SAMPLED, 16, drafters(truth, texts)["tree"]) == truth
    seen = [row for found in recorder.rows.values() for row in found]
    assert all(any(torch.equal(row, other) for other in seen) for [row] in plain.values())
