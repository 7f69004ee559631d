// A reward server of your own in Node: this file, reward.proto in the folder above, and gRPC.
//
//   npm install
//   node server.js [PORT]
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const options = { keepCase: true, longs: String, defaults: true, oneofs: true };
const { Reward } = grpc.loadPackageDefinition(
  loader.loadSync(path.join(__dirname, "..", "reward.proto"), options)
).rollmesh.v1;
const MAX_BYTES = 64 << 20; // gRPC's own limit is 4 MiB

// One item in, one typed outcome out. Here: is the response the ground truth?
function judge(item) {
  if (!item.ground_truth_json) return { unscorable: { reason: "the row has no ground truth" } };
  const correct = Number(item.response.trim() === String(JSON.parse(item.ground_truth_json)).trim());
  return { scored: { total: correct, components: { correct } } };
}

function result(item) {
  try {
    return { item_id: item.item_id, ...judge(item) };
  } catch (error) {
    // A failure is said, never scored as zero.
    return { item_id: item.item_id, error: { code: "exception", message: String(error) } };
  }
}

const service = {
  Score(call, answer) {
    answer(null, { results: call.request.items.map(result) });
  },
  ScoreStream(call) {
    // A judge that takes time would note each item's id here, and look for it when `request.cancel` comes.
    call.on("data", (request) => request.item && call.write(result(request.item)));
    call.on("end", () => call.end());
  },
  Info(call, answer) {
    const limits = { max_items: 512, max_bytes: String(MAX_BYTES), wants_ids: false };
    answer(null, { name: "node-example", version: "1", deterministic: true, streams: true, ...limits });
  },
};

// The standard health service, for orchestrators.
const bytes = (value) => value;
const health = {
  Check: {
    path: "/grpc.health.v1.Health/Check",
    requestStream: false,
    responseStream: false,
    requestSerialize: bytes,
    requestDeserialize: bytes,
    responseSerialize: bytes,
    responseDeserialize: bytes,
  },
};

const server = new grpc.Server({ "grpc.max_receive_message_length": MAX_BYTES, "grpc.max_send_message_length": MAX_BYTES });
server.addService(Reward.service, service);
server.addService(health, { Check: (call, answer) => answer(null, Buffer.from([8, 1])) }); // status: SERVING
server.bindAsync(`127.0.0.1:${process.argv[2] || 50061}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`listening on 127.0.0.1:${port}`);
});
