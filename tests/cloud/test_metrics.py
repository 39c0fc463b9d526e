"""Metrics fed by observations, and the dashboard that draws them."""

from __future__ import annotations

import json
import re

import pytest

from cloud.cost import StepCost
from cloud.metrics import Metrics, knee
from protocol.errors import LinkError
from tests.cloud.ledgers import grow, make_ledger
from tools.models import ROOT

DASHBOARD = ROOT / "cloud" / "grafana" / "outrider.json"

FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "count", "label_values"}
WORDS = FUNCTIONS | {"by", "on", "group_left", "ignoring", "without", "instance"}


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_strangers_do_not_make_up_new_series():
    metrics = Metrics(["acme"])
    before = sum(map(len, samples(metrics).values()))
    for i in range(200):
        ledger = make_ledger(i, device=f"stranger{i}.board")
        metrics.opened(ledger)
        grow(ledger, 2)
        metrics.refused(ledger.device, "bad-open", "anything they say", i)
        metrics.evicted(ledger)
        metrics.flush([ledger], 0.0)
        metrics.closed(ledger)
    metrics.refused("", "bad-message")
    metrics.flush([], 1.0)
    assert sum(map(len, samples(metrics).values())) == before
    value = metrics.registry.get_sample_value
    assert value("outrider_committed_tokens_total", {"tenant": "other"}) == 400
    assert value("outrider_sessions_opened_total", {"tenant": "other"}) == 200
    assert value("outrider_errors_total", {"tenant": "other", "code": "bad-open"}) == 200
    assert value("outrider_committed_tokens_total", {"tenant": "acme"}) == 0


def test_a_session_counts_once_however_often_it_is_looked_at():
    metrics = Metrics(["acme"])
    ledger = make_ledger(1)
    value = metrics.registry.get_sample_value
    metrics.opened(ledger)
    for now in range(4):
        grow(ledger, 5)
        metrics.flush([ledger], now)
        metrics.flush([ledger], now)
        assert value("outrider_committed_tokens_total", {"tenant": "acme"}) == 5 * (now + 1)
        assert value("outrider_sessions", {"tenant": "acme"}) == 1
    grow(ledger, 3)
    metrics.closed(ledger)
    ledger.usage.bytes_out += 7  # the message that was on its way
    metrics.flush([], 5.0)
    assert value("outrider_committed_tokens_total", {"tenant": "acme"}) == 23
    assert value("outrider_payload_bytes_total", {"tenant": "acme", "direction": "out"}) == 23 * 20 + 7
    assert value("outrider_sessions", {"tenant": "acme"}) == 0


def test_the_knee_is_where_a_step_takes_twice_as_long():
    cost = StepCost()
    assert knee(cost, 512) == 0
    for _ in range(5):
        for rows, seconds in ((1, 0.01), (8, 0.01), (32, 0.012), (64, 0.02), (128, 0.04)):
            cost.learn(rows, seconds)
    assert 50 <= knee(cost, 512) <= 70
    assert knee(cost, 16) == 16


def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def check_expression(expression: str, known: dict[str, list[tuple[dict[str, str], float]]]) -> None:
    """That each series and label exists, with the values that are asked for."""
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    for name, selector in re.findall(r"([a-z_]+)\{([^}]*)\}", expression):
        assert name in known, f"{name} in {expression}"
        labels = set().union(*(given for given, _ in known[name])) | {"instance"}
        wanted = re.findall(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"', selector)
        assert {label for label, _, _ in wanted} <= labels, expression
        for label, operator, value in wanted:
            if label != "instance" and operator in ("=", "=~"):
                values = {given[label] for given, _ in known[name]}
                assert set(value.split("|")) <= values, f"{label}={value} in {expression}"
        grouped = re.match(r"(?:sum|count) by \(([a-z_, ]+)\)", expression)
        if grouped:
            assert set(re.split(r",\s*", grouped[1])) <= labels, expression
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression)
    bare = re.sub(r"(by|on|group_left) \([a-z_, ]*\)", "", bare)
    assert set(re.findall(r"[a-z_]{2,}", bare)) - WORDS <= known.keys(), expression


@pytest.fixture
def known() -> dict[str, list[tuple[dict[str, str], float]]]:
    metrics = Metrics(["acme"])
    metrics._info.info({"verifier": "v", "target": "t", "model": "m", "numerics": "n", "version": "0"})
    return samples(metrics)


class TestDocs:
    PAGE = ROOT / "docs" / "monitoring.md"

    def test_every_alert_asks_for_what_exists(self, known):
        alerts = re.findall(r"^\|[^|]+\| `(.+?)` \|", self.PAGE.read_text().partition("## Alerts")[2], re.MULTILINE)
        assert len(alerts) >= 10
        for expression in alerts:
            check_expression(expression.replace("\\|", "|"), known)

    def test_the_table_names_every_metric_and_no_other(self, known):
        table = self.PAGE.read_text().partition("## Metrics")[2].partition("## Alerts")[0]
        named = set(re.findall(r"`(outrider_[a-z_]+)`", table))
        bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known if name.startswith("outrider_")}
        assert named == {name for name in bare if not name.endswith("_created")}


class TestDashboard:
    def test_every_expression_names_series_and_labels_that_exist(self, known):
        assert len(expressions()) > 25
        for expression in expressions():
            check_expression(expression, known)

    def test_what_is_measured_is_drawn(self):
        drawn = " ".join(expressions())
        ours = {name for name in samples(Metrics()) if name.startswith("outrider_")}
        left = {name for name in ours if re.sub(r"_(created|bucket|sum|count|total)$", "", name) not in drawn}
        assert left <= {"outrider_verifier_info"}

    def test_it_is_a_dashboard_that_grafana_can_import(self):
        board = json.loads(DASHBOARD.read_text())
        assert board["uid"] and board["title"] and board["schemaVersion"] >= 36 and "id" not in board
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert variables == {"datasource", "instance"}
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{panel['title']} lies over another"
            taken |= cells
            if panel["type"] != "row":
                assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                assert panel["fieldConfig"]["defaults"]["unit"] and panel["targets"]


class TestStatus:
    def test_live_figures_are_of_the_moment_between_two_looks(self):
        from cloud.status import live

        def look(tokens, steps, step_s, sessions_sum, draft, accepted):
            def series(name, value, **labels):
                return (name, frozenset(labels.items())), value

            return dict(
                [
                    series("outrider_committed_tokens_total", tokens, tenant="a"),
                    series("outrider_committed_tokens_total", 2 * tokens, tenant="b"),
                    series("outrider_accepted_tokens_total", accepted, tenant="a"),
                    series("outrider_rows_total", draft, tenant="a", kind="draft"),
                    series("outrider_rows_total", 9999.0 * draft, tenant="a", kind="root"),
                    series("outrider_step_seconds_count", steps),
                    series("outrider_step_seconds_sum", step_s),
                    series("outrider_step_sessions_count", steps),
                    series("outrider_step_sessions_sum", sessions_sum),
                    series("outrider_kv_blocks", 30.0, state="used"),
                    series("outrider_kv_blocks", 20.0, state="retained"),
                    series("outrider_kv_blocks", 50.0, state="empty"),
                ]
            )

        found = live(look(100, 10, 1.0, 20, 50, 10), look(200, 30, 1.5, 80, 90, 40), 2.0)
        assert found.tokens_per_s == 150 and found.step_ms == 25 and found.occupancy == 3
        assert found.acceptance == 0.75 and found.kv_used == 0.3 and found.queue_ms is None

    def test_a_verifier_that_does_not_answer_is_named_and_hides_no_other(self):
        from cloud.status import read_live

        found, failed = read_live(["http://127.0.0.1:9"], sleep=lambda seconds: None)
        assert found == {} and isinstance(failed[0], LinkError) and "127.0.0.1:9" in str(failed[0])
        with pytest.raises(LinkError, match=r"\[http\]"):
            raise failed[0]
