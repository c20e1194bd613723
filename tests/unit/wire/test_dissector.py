from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from turbopump.wire import framing
from turbopump.wire.__main__ import main
from turbopump.wire.command import Command
from vectors import frame, frames


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], direction: str, text: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main([direction])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def dissect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda direction, text: run(monkeypatch, capsys, direction, text)


def decoded(dissect: Any, *names: str) -> list[dict[str, Any]]:
    code, out, err = dissect("decode", "\n".join(frame(name).hex() for name in names))
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_every_golden_frame_round_trips(dissect: Any) -> None:
    hex_lines = "".join(vector["hex"] + "\n" for vector in frames())
    code, out, _ = dissect("decode", hex_lines)
    assert code == 0
    for line, vector in zip(out.splitlines(), frames(), strict=True):
        fields = json.loads(line)
        assert fields["code"] == vector["code"]
        assert fields["serialize"] == vector["serialize"]
    assert dissect("encode", out) == (0, hex_lines, "")


def test_names_of_a_frame(dissect: Any) -> None:
    [fields] = decoded(dissect, "route_missing.request")
    assert fields == {
        "code": 105,
        "flag": 0,
        "opaque": fields["opaque"],
        "language": "JAVA",
        "version": 409,
        "remark": None,
        "extFields": {"topic": "NoSuchTopic"},
        "serialize": "JSON",
        "body_hex": "",
    }


def test_bodies_of_known_kinds(dissect: Any) -> None:
    heartbeat, pull, answer, batch, config, register = decoded(
        dissect,
        "heartbeat_producer.request",
        "pull_found.request",
        "pull_found.response",
        "send_batch.request",
        "update_broker_config.request",
        "broker_register.request",
    )
    assert heartbeat["body"]["clientID"] == "10.20.30.40@producer"
    assert "body" not in pull
    assert [message["physicalOffset"] for message in answer["body"]] == [0, 352, 611]
    assert {"topic", "properties", "bodyHex", "msgId", "uniqKey", "tags"} <= answer["body"][
        0
    ].keys()
    assert all("properties" in message for message in batch["body"])
    assert config["body"]["defaultQueryMaxNum"] == "32"
    assert register["body"]["topicConfigSerializeWrapper"]["dataVersion"]["counter"] == 0


def test_keys_that_are_objects_become_texts(dissect: Any) -> None:
    [stats] = decoded(dissect, "topic_stats.response")
    key = next(iter(stats["body"]["offsetTable"]))
    assert json.loads(key).keys() == {"brokerName", "queueId", "topic"}


def test_the_body_of_a_message_is_left_alone(dissect: Any) -> None:
    [send] = decoded(dissect, "send_first.request")
    assert "body" not in send
    assert bytes.fromhex(send["body_hex"]) == b"Hello RocketMQ"


def test_several_frames_on_a_line_and_blank_lines(dissect: Any) -> None:
    both = frame("pull_found.request").hex() + frame("pull_found.response").hex()
    code, out, _ = dissect("decode", f"\n  {both}  \n\n")
    assert code == 0
    assert len(out.splitlines()) == 2


GOOD = frame("route_missing.request")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("zz", "line 1: 'z' is not a hex digit (at byte 0)"),
        ("0000 0g", "line 1: 'g' is not a hex digit (at byte 2)"),
        ("000", "line 1: half a byte (at byte 1)"),
        (
            GOOD.hex()[:-2],
            f"line 1: the last {len(GOOD) - 1} bytes are not a whole frame (at byte 0)",
        ),
        ("ffffffff", "line 1: a frame must be 4 to 16777216 bytes, got -1 (at byte 0)"),
        (
            GOOD.hex() + "00",
            f"line 1: the last 1 bytes are not a whole frame (at byte {len(GOOD)})",
        ),
    ],
)
def test_bad_hex(dissect: Any, line: str, complaint: str) -> None:
    code, _, err = dissect("decode", line)
    assert (code, err.strip()) == (2, complaint)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated (at byte 1)"),
        ('{"flag":1}', "missing required field `code`"),
        ('{"flag":1,"code":"x"}', "Expected `int`, got `str` - at `$.code` (at byte 10)"),
        ('{"code":1,"colour":2}', "unknown field `colour` (at byte 10)"),
        ('{"code":1,"language":"COBOL"}', "language 'COBOL' is none of JAVA"),
        ('{"code":1,"language":"COBOL"}', "(at byte 10)"),
        ('{"code":1,"body_hex":"0"}', "body_hex: half a byte (at byte 10)"),
        ('{"code":1,"opaque":9999999999}', "opaque` (at byte 10)"),
        ('{"code":1,"é":2,"colour":2}', "unknown field"),
        ('{"code":1,"body":' + "[" * 20_000 + "]" * 20_000 + "}", "byte"),
        ('{"code":40000,"serialize":"ROCKETMQ"}', "code 40000 does not fit into a binary header"),
        ('{"code":10,"body":{"a":1}}', "give body_hex"),
        ('{"code":320,"body":[{"bodyHex":"x"}]}', "message of a batch"),
        ('{"code":320,"body":[7]}', "message of a batch"),
        ('{"code":34,"body":{"clientID":1}}', "Heartbeat"),
    ],
)
def test_bad_json(dissect: Any, line: str, complaint: str) -> None:
    code, out, err = dissect("encode", line)
    assert (code, out) == (2, "")
    assert err.startswith("line 1: ")
    assert complaint in err


def test_lines_before_a_bad_one_are_printed(dissect: Any) -> None:
    code, out, err = dissect("decode", f"{GOOD.hex()}\nxx\n{GOOD.hex()}\n")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert err.startswith("line 2: ")


def test_encode_fills_in_defaults_and_accepts_json_bodies(dissect: Any) -> None:
    code, out, _ = dissect("encode", '{"code":34,"body":{"clientID":"c","producerDataSet":[]}}')
    assert code == 0
    code, out, _ = dissect("decode", out)
    fields = json.loads(out)
    assert fields["language"] == "PYTHON"
    assert fields["body"] == {"clientID": "c", "producerDataSet": []}


FROM_JSON = [
    "heartbeat_producer.request",
    "send_batch.request",
    "group_create.request",
    "broker_register.request",
    "update_broker_config.request",
    "orderly_consumer_start.LOCK_BATCH_MQ.request",
    "reset_offset.RESET_CONSUMER_CLIENT_OFFSET.oneway",
]


@pytest.mark.parametrize("name", FROM_JSON)
def test_frames_are_also_encoded_from_their_decoded_body(dissect: Any, name: str) -> None:
    [fields] = decoded(dissect, name)
    without_hex = json.dumps({key: item for key, item in fields.items() if key != "body_hex"})
    code, out, err = dissect("encode", without_hex)
    assert (code, err) == (0, "")
    code, out, _ = dissect("decode", out)
    assert json.loads(out)["body"] == fields["body"]


@pytest.mark.parametrize(
    "body", [b"[1e999]", b"[" * 900 + b"]" * 900, b'{"a":' * 80 + b"1" + b"}" * 80, b"{1:1e999}"]
)
def test_bodies_that_only_look_like_json(dissect: Any, body: bytes) -> None:
    frame_with_body = framing.encode(Command(code=0, flag=1, body=body))
    code, out, _ = dissect("decode", frame_with_body.hex())
    assert code == 0
    assert json.loads(out)["body_hex"] == body.hex()


def test_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turbopump.wire", "decode"],
        input=b"xx\n",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == b"line 1: 'x' is not a hex digit (at byte 0)\n"
