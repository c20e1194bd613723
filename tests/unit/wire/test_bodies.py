from __future__ import annotations

import pytest

from turbopump.errors import BodyError
from turbopump.message import MessageQueue
from turbopump.wire.bodies import (
    BrokerData,
    ConsumeFrom,
    ConsumerConnections,
    ConsumerData,
    ConsumerOffsets,
    ConsumeType,
    DirectConsumption,
    Heartbeat,
    LockedQueues,
    MessageModel,
    QueueData,
    QueueOffsets,
    Subscription,
    TopicRoute,
)

ROUTE = TopicRoute(
    broker_datas=[
        BrokerData(
            broker_addrs={0: "127.0.0.1:10911"}, broker_name="broker-a", cluster="DefaultCluster"
        )
    ],
    queue_datas=[QueueData(broker_name="broker-a", perm=7, read_queue_nums=8, write_queue_nums=8)],
)


def test_route_for_new_clients_is_proper_json() -> None:
    assert ROUTE.encode() == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"broker-a",'
        b'"cluster":"DefaultCluster"}],"filterServerTable":{},"queueDatas":[{"brokerName":'
        b'"broker-a","perm":7,"readQueueNums":8,"topicSysFlag":0,"writeQueueNums":8}]}'
    )


def test_route_for_old_clients_has_bare_keys() -> None:
    assert b'"brokerAddrs":{0:"127.0.0.1:10911"}' in ROUTE.encode(bare_keys=True)


def test_queues_as_keys_in_all_three_forms() -> None:
    offsets = QueueOffsets(offset_table={MessageQueue("T", "b", 3): 5})
    bare = offsets.encode(bare_keys=True)
    assert bare == b'{"offsetTable":{{"topic":"T","brokerName":"b","queueId":3}:5}}'
    assert QueueOffsets.decode(bare) == offsets
    assert QueueOffsets.decode(offsets.encode()) == offsets
    spaced = b'{"offsetTable":{ {"brokerName":"b", "queueId":"3", "topic":"T"} : 5 }}'
    assert QueueOffsets.decode(spaced) == offsets


def test_integer_keys_quoted_or_not() -> None:
    expected = ConsumerOffsets(offset_table={"T@g": {0: 1, 1: 0}})
    for text in (b'{"offsetTable":{"T@g":{0:1,1:0}}}', b'{"offsetTable":{"T@g":{"0":1,"1":0}}}'):
        assert ConsumerOffsets.decode(text) == expected


def test_heartbeat_of_a_client_that_sends_numbers_as_texts() -> None:
    heartbeat = Heartbeat.decode(
        b'{"clientID":"c","producerDataSet":[],"consumerDataSet":[{"groupName":"g",'
        b'"consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",'
        b'"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","subscriptionDataSet":[{"topic":"T",'
        b'"subString":"TagA","subVersion":"17","tagsSet":["TagA"],"codeSet":["2598919"]}]}]}'
    )
    assert heartbeat.consumer_data_set == [
        ConsumerData(
            group_name="g",
            consume_type=ConsumeType.PUSH,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFrom.LAST_OFFSET,
            subscription_data_set=[
                Subscription(
                    topic="T",
                    sub_string="TagA",
                    sub_version=17,
                    tags_set=["TagA"],
                    code_set=[2598919],
                )
            ],
        )
    ]


def test_heartbeat_of_a_client_that_sends_places_instead_of_names() -> None:
    text = b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":%d,' % 1
    text += b'"messageModel":0,"consumeFromWhere":4}]}'
    [group] = Heartbeat.decode(text).consumer_data_set
    assert group.consume_type is ConsumeType.PUSH
    assert group.message_model is MessageModel.BROADCASTING
    assert group.consume_from_where is ConsumeFrom.FIRST_OFFSET
    lower = text.replace(b'"messageModel":0', b'"messageModel":"clustering"')
    assert Heartbeat.decode(lower).consumer_data_set[0].message_model is MessageModel.CLUSTERING
    for unknown in (b"7", b'"SOMETHING"'):
        odd = text.replace(b'"messageModel":0', b'"messageModel":' + unknown)
        assert Heartbeat.decode(odd).consumer_data_set[0].message_model is None
    with pytest.raises(BodyError, match="Heartbeat"):
        Heartbeat.decode(text.replace(b'"messageModel":0', b'"messageModel":[]'))
    with pytest.raises(BodyError, match="Heartbeat"):
        Heartbeat.decode(b'{"clientID":"c","consumerDataSet":[1]}')


def test_members_that_are_none_are_omitted() -> None:
    assert b"orderTopicConf" not in ROUTE.encode()
    assert b"null" not in ConsumerData(group_name="g").encode()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "truncated"),
        (b"[]", "LockedQueues: Expected `object`, got `array`"),
        (b'{"lockOKMQSet":[{"topic":"T"}]}', "missing required field `brokerName`"),
        (b'{"lockOKMQSet":7}', "Expected `array`, got `int`"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bodies_of_the_wrong_type_are_rejected(data: bytes, complaint: str) -> None:
    with pytest.raises(BodyError, match=complaint):
        LockedQueues.decode(data)


def test_queues_sort_as_group_members_sort_them() -> None:
    queues = [MessageQueue("T", "b", 10), MessageQueue("T", "b", 9), MessageQueue("T", "a", 11)]
    assert [str(queue) for queue in sorted(queues)] == ["T@a:11", "T@b:9", "T@b:10"]


RESULTS = ["SUCCESS", "LATER", "ROLLBACK", "COMMIT", "THROW_EXCEPTION", "RETURN_NULL"]


@pytest.mark.parametrize(("place", "name"), list(enumerate(RESULTS)))
def test_direct_result_as_a_place_or_a_name(place: int, name: str) -> None:
    for given in (str(place), f'"{place}"', f'"CR_{name}"'):
        body = f'{{"autoCommit":true,"consumeResult":{given},"order":false,"spentTimeMills":7}}'
        assert DirectConsumption.decode(body.encode()).consume_result == f"CR_{name}"


def test_unknown_direct_results() -> None:
    assert DirectConsumption.decode(b'{"consumeResult":"CR_NEW"}').consume_result == "CR_NEW"
    assert DirectConsumption.decode(b'{"consumeResult":null}').consume_result is None
    with pytest.raises(BodyError, match="consumeResult"):
        DirectConsumption.decode(b'{"consumeResult":6}')


def test_members_that_are_null_are_missing() -> None:
    beat = Heartbeat.decode(
        b'{"clientID":"c","producerDataSet":null,"consumerDataSet":[{"groupName":"g",'
        b'"subscriptionDataSet":[{"topic":"T","subString":"*","tagsSet":null,"codeSet":null}]}]}'
    )
    assert beat.producer_data_set == []
    (subscription,) = beat.consumer_data_set[0].subscription_data_set
    assert (subscription.tags_set, subscription.code_set) == ([], [])
    with pytest.raises(BodyError, match="clientID"):
        Heartbeat.decode(b'{"clientID":null}')


def test_members_of_a_group_that_consume_in_a_way_we_do_not_know() -> None:
    connections = ConsumerConnections.decode(b'{"consumeType":"CONSUME_POP","messageModel":0}')
    assert connections.consume_type is None
    assert connections.message_model is MessageModel.BROADCASTING
