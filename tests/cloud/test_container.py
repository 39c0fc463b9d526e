"""The image and the compose files: linted by the tools of their makers, held to what operators are promised, and the
image's own steps run in a fresh environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from cloud.config import CloudConfig
from cloud.gateway import LATE_S
from link.config import load
from tools.models import ROOT

CLOUD = ROOT / "cloud"
STATE, VENV, SOURCE = "/var/lib/outrider", "/opt/outrider", "/src"
HTTP_PORT = 9178
GOODBYE_S = LATE_S + 3.0  # of the gateway, without the step under way

steps = pytest.mark.skipif(
    os.environ.get("OUTRIDER_IMAGE_STEPS") != "1", reason="installs torch anew; OUTRIDER_IMAGE_STEPS=1 asks for it"
)


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def instructions(stage: str | None = None) -> list[tuple[str, str]]:
    """(instruction, value) of the Dockerfile, or of one of its stages."""
    parser = DockerfileParser(path=str(CLOUD / "Dockerfile"), cache_content=True)
    found: list[tuple[str, str]] = []
    at = ""
    for one in parser.structure:
        if one["instruction"] == "FROM":
            at = one["value"].split()[-1]
        if one["instruction"] != "COMMENT" and stage in (None, at):
            found.append((one["instruction"], one["value"]))
    return found


def values(instruction: str, stage: str = "image") -> list[str]:
    return [value for name, value in instructions(stage) if name == instruction]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLOUD / "compose.yaml").read_text())["services"]
    return found


# -- the image ----------------------------------------------------------------------------------------------------


def test_the_dockerfile_passes_its_linter() -> None:
    done = subprocess.run([tool("hadolint"), "--no-color", CLOUD / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_each_variant_is_made_of_stages_that_are_there(variant: str) -> None:
    froms = [value.replace("${VARIANT}", variant).split() for name, value in instructions() if name == "FROM"]
    known: set[str] = set()
    for image, *_, name in froms:
        assert image in known or re.fullmatch(r"[a-z]+:[\w.-]+", image), image
        known.add(name)
    copied = [re.search(r"--from=(\S+)", value) for value in values("COPY")]
    assert all(match and match[1] in known for match in copied)


def test_it_runs_as_a_numbered_user_that_may_write_its_state_only() -> None:
    assert values("USER") == ["10001:10001"]
    assert json.loads(values("VOLUME")[0]) == [STATE, "/tmp"]
    (made,) = [value for value in values("RUN") if "useradd" in value]
    assert f"install -d -o 10001 -g 10001 -m 0750 {STATE}" in made
    environment = dict(pair.split("=", 1) for pair in shlex.split(" ".join(values("ENV"))))
    assert environment["HOME"] == STATE and environment["TMPDIR"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_it_is_one_process_that_hears_the_signal_to_drain() -> None:
    assert json.loads(values("ENTRYPOINT")[0]) == ["outrider-cloud"]
    assert json.loads(values("CMD")[0])[-3:] == ["serve", "--config", "/etc/outrider/cloud.toml"]
    assert values("STOPSIGNAL") == ["SIGTERM"]
    (check,) = values("HEALTHCHECK")
    assert f"http://127.0.0.1:{HTTP_PORT}/healthz" in check and "CMD [" in check


def test_only_what_the_image_is_made_of_is_sent_to_the_builder() -> None:
    rules = (CLOUD / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {one for value in values("COPY", "build") for one in value.split()[:-1]}
    assert sent == copied
    kept_back = [rule for rule in rules[1:] if not rule.startswith("!")]
    for secret in ("cloud/secrets", "cloud/mosquitto", "cloud/compose.yaml", "cloud/Dockerfile"):
        assert any(fnmatch(secret, rule) for rule in kept_back), secret
    assert not re.search(r"password|secret|token", (CLOUD / "Dockerfile").read_text(), re.IGNORECASE)


def test_the_versions_are_those_that_are_tested() -> None:
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    vllm = re.search(r'"(vllm==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert torch and f"TORCH={torch[1]}" in values("ARG", "build")
    assert vllm and vllm[1] in " ".join(values("RUN", "packages-cuda"))


# -- the image's own steps ------------------------------------------------------------------------------------------


class Image:
    """What the Dockerfile's CPU variant installs, with `/opt` and `/src` in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.source = folder / "opt" / "outrider", folder / "src"
        self.source.mkdir(parents=True)
        self.environment = {**os.environ, "PATH": f"{self.venv}/bin:{os.environ['PATH']}", "PYTHONPATH": ""}

    def build(self) -> None:
        for name, value in instructions("build") + instructions("packages-cpu"):
            match name:
                case "ARG":
                    key, _, default = value.partition("=")
                    self.environment.setdefault(key, default)
                case "COPY":
                    *sources, destination = value.split()
                    for source in sources:
                        self._copy(ROOT / source, self.source / destination)
                case "RUN":
                    step = re.sub(r"--mount=\S+\s+", "", value).replace(VENV, str(self.venv))
                    subprocess.run(["sh", "-ec", step], cwd=self.source, env=self.environment, check=True)

    @staticmethod
    def _copy(source: Path, destination: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, destination)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The image's entrypoint, away from its source and without a word into its own files."""
        home = self.source.parent / "home"
        home.mkdir(exist_ok=True)
        (entrypoint,) = json.loads(values("ENTRYPOINT")[0])
        environment = {**self.environment, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [self.venv / "bin" / entrypoint, *arguments], cwd=home, env=environment, capture_output=True, text=True
        )

    def files(self) -> set[tuple[str, int]]:
        return {(str(path), path.stat().st_mtime_ns) for path in self.venv.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    made = Image(folder)
    made.build()
    yield made
    shutil.rmtree(folder)


@steps
@pytest.mark.timeout(1500)  # a fresh torch
def test_what_the_steps_install_serves(image: Image, tmp_path: Path) -> None:
    """It starts, names what is wrong with a configuration, and comes as far as the target that is not there."""
    before = image.files()
    told = image.run("--help")
    assert told.returncode == 0 and "serve" in told.stdout
    config = tmp_path / "cloud.toml"
    shipped = (CLOUD / "compose.toml").read_text()
    config.write_text(shipped.replace("[engine]", "[engine]\nmodle = 1"))
    wrong = image.run("serve", "--config", str(config))
    assert wrong.returncode == 78 and "modle" in wrong.stderr
    config.write_text(shipped.replace("/models/target", str(tmp_path / "absent")).replace("/var/lib", str(tmp_path)))
    absent = image.run("serve", "--config", str(config))
    assert absent.returncode == 66 and "absent" in absent.stderr, absent.stderr
    assert image.files() == before


@steps
@pytest.mark.timeout(1500)  # a fresh torch
def test_what_the_steps_install_is_whole(image: Image) -> None:
    python = image.venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "check"], check=True, env=image.environment)
    names = "cloud.engines.torch_engine, cloud.health, cloud.metrics, cloud.meter, link.mqtt"
    subprocess.run([python, "-c", f"import {names}"], check=True, cwd=image.venv, env=image.environment)


# -- compose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files_are_of_the_specification(file: str) -> None:
    checker = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(CLOUD / file)]
    done = subprocess.run(checker, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["broker", "verifier"])
def test_services_have_no_right_that_they_do_not_need(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith(("127.0.0.1:", "${OUTRIDER_LISTEN:-127.0.0.1}:")) for port in service["ports"])
    assert all(volume.endswith(":ro") or volume == f"state:{STATE}" for volume in service["volumes"])


def test_secrets_are_files_that_are_neither_committed_nor_sent_to_the_builder() -> None:
    compose = yaml.safe_load((CLOUD / "compose.yaml").read_text())
    for secret in compose["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    ignored = subprocess.run(["git", "check-ignore", "-q", "cloud/secrets/passwords"], cwd=ROOT)
    assert ignored.returncode == 0
    assert not any("environment" in service for service in compose["services"].values())


def test_the_verifier_has_time_to_drain_and_a_place_to_write(services: dict[str, Any]) -> None:
    verifier = services["verifier"]
    assert float(verifier["stop_grace_period"].removesuffix("s")) > 3 * GOODBYE_S
    assert any(mount.startswith("/tmp:") for mount in verifier["tmpfs"])
    assert f"http://127.0.0.1:{HTTP_PORT}/healthz" in verifier["healthcheck"]["test"][-1]


def test_the_shipped_configuration_is_the_one_that_compose_describes(services: dict[str, Any]) -> None:
    config = load(CLOUD / "compose.toml", CloudConfig)
    assert config.broker.host in services and config.broker.port == 1883
    assert str(config.broker.password_file) == "/run/secrets/verifier_password"
    assert config.http.port == HTTP_PORT
    assert f"{config.engine.model}:ro" in " ".join(services["verifier"]["volumes"])
    assert config.metering.directory is not None and config.metering.directory.is_relative_to(STATE)
    access = (CLOUD / "mosquitto" / "acl").read_text()
    assert f"user {config.broker.username}\n" in access
    broker = (CLOUD / "mosquitto" / "mosquitto.conf").read_text()
    limit = re.search(r"^memory_limit (\d+)$", broker, re.MULTILINE)
    assert limit and int(limit[1]) < int(services["broker"]["mem_limit"].removesuffix("m")) << 20
    for key in ("password_file", "acl_file"):
        path = re.search(rf"^{key} (\S+)$", broker, re.MULTILINE)
        mounts = " ".join(services["broker"]["volumes"]) + " /run/secrets/passwords"
        assert path and path[1] in mounts
