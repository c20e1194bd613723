// Run by the compatibility tests: the Node client does as it is told.
// `node client.js NAMESERVER`; see peers.py for the lines that go in and out.
'use strict';

const readline = require('readline');
const { Consumer, Message, Producer } = require('ali-ons');

const options = {
  httpclient: {},
  // It signs its requests; a server without access control does not look.
  accessKeyId: 'key',
  accessKeySecret: 'secret',
  nameSrv: process.argv[2],
  // New topics and members are to be found sooner than every 30 s and 10 s.
  pollNameServerInteval: 500,
  rebalanceInterval: 500,
};
const consumers = new Map();
let producer = null;

function report(line) {
  process.stdout.write(`@${JSON.stringify(line)}\n`);
}

function described(group, message) {
  return {
    group,
    topic: message.topic,
    body: message.body.toString(),
    tags: message.tags || '',
    keys: message.keys || '',
    msg_id: message.msgId,
    queue_id: message.queueId,
    queue_offset: Number(message.queueOffset),
    reconsume_times: message.reconsumeTimes,
    born_ms: Number(message.bornTimestamp),
    stored_ms: Number(message.storeTimestamp),
    at_ms: Date.now(),
    // The client makes up a TAGS of null for a message without.
    properties: Object.fromEntries(Object.entries(message.properties).filter(([ , value ]) => value)),
  };
}

async function startedProducer() {
  if (producer === null) {
    producer = new Producer({ producerGroup: 'node-producers', ...options });
    await producer.ready();
  }
  return producer;
}

const actions = {
  async send({ message }) {
    const prepared = new Message(message.topic, message.tags || '', message.body);
    if (message.keys) prepared.keys = message.keys.split(' ');
    if (message.delay_level) prepared.delayTimeLevel = message.delay_level;
    Object.assign(prepared.properties, message.properties);
    const sent = await (await startedProducer()).send(prepared);
    return {
      status: sent.sendStatus === 'SEND_OK' ? 0 : 1,
      msg_id: sent.msgId,
      queue_offset: Number(sent.queueOffset),
    };
  },

  // `failures` says how often a message fails, by its body; `settings` are the client's own.
  async push({ group, topic, expression = '*', failures = {}, broadcasting = false, settings = {} }) {
    const consumer = new Consumer({
      consumerGroup: group, isBroadcast: broadcasting, ...settings, ...options,
    });
    consumers.set(group, consumer);
    consumer.on('error', error => process.stderr.write(`${error.stack}\n`));
    consumer.subscribe(topic, expression, async message => {
      const seen = described(group, message);
      report({ got: seen });
      failures[seen.body] = (failures[seen.body] || 0) - 1;
      if (failures[seen.body] >= 0) throw new Error(`${seen.body} fails`);
    });
    await consumer.ready();
    return null;
  },

  async stop({ group }) {
    await consumers.get(group).close();
    consumers.delete(group);
    return null;
  },
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const call = JSON.parse(line);
    try {
      report({ answer: await actions[call.do](call.with) });
    } catch (error) {
      report({ error: error.stack });
    }
  }
  process.exit(0);
}

main();
