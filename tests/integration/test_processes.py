"""The commands as a person runs them, on a real model and a real broker: what they print, how they exit, and that the
text survives the death of either side.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from edge.drafters import manifest
from edge.journal import Journal
from edge.text import Text
from protocol.sampling import Sampling
from tests.commands import NUM_TOKENS, PROMPT, CommandFleet
from tools.broker import free_port
from tools.demo.reference import decode_alone


@pytest.fixture
def fleet(tmp_path, smollm2) -> Iterator[CommandFleet]:
    made = CommandFleet(tmp_path, *smollm2)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def text(smollm2) -> Text:
    return Text.load(smollm2[0], manifest.read(smollm2[0], "drafter"))


@pytest.fixture(scope="module")
def expected(smollm2, text) -> dict[str, list[int]]:
    """The target's own ids, greedy and sampled."""
    engine = load(smollm2[1], Numerics(mode="exact"), threads=2)
    prompt = text.chat([{"role": "user", "content": PROMPT}])
    samplings = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=5)}
    stop = sorted(text.stop_ids)
    return {name: decode_alone(engine, prompt, sampling, NUM_TOKENS, stop) for name, sampling in samplings.items()}


def test_a_verifier_is_killed_in_mid_text_and_another_takes_over(fleet, text, expected):
    fleet.start_verifier("v1")
    fleet.start_verifier("v2")
    fleet.start_board()
    quiet = "".join(fleet.ask(temperature=0.8, top_p=0.95, seed=5))
    fleet.commits.clear()
    fleet.begun.clear()
    fleet.owner = ""
    pieces = []
    for piece in fleet.ask(temperature=0.8, top_p=0.95, seed=5):
        pieces.append(piece)
        all_alive = all(child.poll() is None for child in fleet.verifiers.values())
        if fleet.owner and len(fleet.commits) > 8 and all_alive:
            fleet.verifiers[fleet.owner].send_signal(signal.SIGKILL)
    assert any(child.poll() is not None for child in fleet.verifiers.values())
    assert "".join(pieces) == quiet == text.decode(expected["sampled"])
    assert fleet.begun[max(fleet.begun)] >= fleet.begun[0] + 8, "what was committed is not drawn again"


def test_a_board_is_killed_in_mid_text_and_goes_on_from_its_journal(fleet, text, expected):
    fleet.start_verifier("v1")
    board = fleet.start_board()
    with pytest.raises(httpx.HTTPError):
        for _ in fleet.ask():
            if len(fleet.commits) > 8:
                board.send_signal(signal.SIGKILL)
    journal = Journal(fleet.folder / "state" / "journal")
    (entry,) = journal.unfinished()
    assert 0 < len(entry.committed) < NUM_TOKENS
    fleet.start_board()
    fleet.until(lambda: not journal.unfinished(), 60)
    (entry,) = journal.entries()
    assert entry.committed == expected["greedy"]


def test_chat_check_and_status(fleet, text, expected):
    fleet.start_verifier("v1")
    checked = fleet.run("edge", "check", "--config", str(fleet.edge_config), "--json")
    report = json.loads(checked.stdout)
    assert checked.returncode == 0 and report["exit_code"] == 0 and report["status"] in ("ok", "warn")
    assert [finding["name"] for finding in report["findings"]][-4:] == ["drafter", "self-test", "broker", "verifier"]
    answer = fleet.run("edge", "chat", PROMPT, "--config", str(fleet.edge_config), "--max-tokens", str(NUM_TOKENS))
    assert answer.stdout.strip() == text.decode(expected["greedy"]).strip(), answer.stderr
    shown = fleet.run(
        "edge", "chat", PROMPT, "--config", str(fleet.edge_config), "--max-tokens", str(NUM_TOKENS), "--show-drafts"
    )
    assert text.decode(expected["greedy"]).split()[-1] in shown.stdout
    status = fleet.run("cloud", "status", "--broker", f"127.0.0.1:{fleet.broker.port}", "--json")
    assert json.loads(status.stdout)["verifier"] == "v1"


def test_bad_input_is_named_with_an_exit_code_of_its_own(fleet, smollm2, tmp_path):
    def check(config: Path) -> tuple[int, str]:
        done = fleet.run("edge", "check", "--config", str(config), "--wait-s", "2")
        return done.returncode, done.stdout + done.stderr

    unknown = fleet.write_edge("unknown.toml", drafter=f'model = "{smollm2[0]}"\nthread = 1')
    code, said = check(unknown)
    assert code == 78 and "[drafter]" in said and "`thread`" in said and "threads" in said
    code, said = check(fleet.write_edge("absent.toml", drafter='model = "/nowhere"'))
    assert code == 66 and "/nowhere/manifest.json" in said and "tools.export" in said
    code, said = check(fleet.edge_config)
    assert code == 69 and "no verifier is up" in said and "outrider-cloud serve" in said
    code, said = check(fleet.write_edge("gone.toml", broker=f"port = {free_port()}"))
    assert code == 69 and "refused" in said

    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    weights = manifest.read(smollm2[0], "drafter").weights_files[0]
    for file in smollm2[0].iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes() if file.name != weights else b"not a model")
    code, said = check(fleet.write_edge("corrupt.toml", drafter=f'model = "{corrupt}"'))
    assert code == 66 and weights in said

    serve = fleet.run("cloud", "serve", "--config", str(unknown))
    assert serve.returncode == 78 and "unknown.toml" in serve.stderr


def test_a_prompt_longer_than_the_context_ends_with_a_clear_message(fleet):
    fleet.start_verifier("v1")
    long = "sea " * 9000
    done = fleet.run("edge", "chat", long, "--config", str(fleet.edge_config))
    assert done.returncode == 1 and "over-context" in done.stderr and "8192" in done.stderr


def test_the_api_refuses_what_it_does_not_know_by_name(fleet):
    fleet.start_verifier("v1")
    fleet.start_board()
    url = f"http://127.0.0.1:{fleet.api_port}/v1/chat/completions"
    messages = [{"role": "user", "content": "hi"}]
    unknown = httpx.post(url, json={"messages": messages, "min_p": 0.1})
    assert unknown.status_code == 400 and "min_p" in unknown.json()["error"]["message"]
    bad = httpx.post(url, json={"messages": messages, "temperature": -1})
    assert bad.status_code == 400 and "temperature" in bad.json()["error"]["message"]
    whole = httpx.post(url, json={"messages": messages, "max_tokens": 5}, timeout=60).json()
    assert whole["usage"]["completion_tokens"] == 5 and whole["choices"][0]["finish_reason"] == "length"
