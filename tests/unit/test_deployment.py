"""What the server is deployed with: the compose file, the systemd unit, the documented commands."""

from __future__ import annotations

import re

from documents import ROOT, blocks

COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "turbopump.service").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def exposed_ports() -> list[str]:
    (ports,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    return str(ports).split()


def test_compose_publishes_every_port_on_the_loopback_address_only() -> None:
    published = re.findall(r'^ +- "([^"]*:\d+)"$', COMPOSE, re.MULTILINE)
    assert published == [f"127.0.0.1:{port}:{port}" for port in exposed_ports()]


def test_documented_commands_publish_ports_on_the_loopback_address_only() -> None:
    commands = "".join(block.text for block in blocks("console"))
    published = re.findall(r"-p (\S+)", commands)
    assert published == [f"127.0.0.1:{port}:{port}" for port in exposed_ports()]


def test_compose_uses_the_volume_of_the_image() -> None:
    (volume,) = re.findall(r'^VOLUME \["(.*)"\]$', DOCKERFILE, re.MULTILINE)
    assert f"- data:{volume}\n" in COMPOSE
    assert COMPOSE.endswith("volumes:\n  data:\n")


def test_the_service_keeps_its_data_in_its_state_directory() -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    (state,) = re.findall(r"^StateDirectory=(.*)$", UNIT, re.MULTILINE)
    assert command.endswith(f"/bin/turbopump standalone --dir /var/lib/{state}")
    assert "--host" not in command, "the default address is 127.0.0.1"
