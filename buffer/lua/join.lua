-- Enters a member under a new connection generation; what it still holds gets a full term.
-- ARGV: '', member, members that the run may have (0: any number), description (serialized Member), call,
-- role. `call` grows with every join of a member; 0: not numbered.
load_run()
local most, call, joins = tonumber(ARGV[3]), tonumber(ARGV[5]), RUN .. ':joins'
local last = tonumber(redis.call('HGET', joins, ARGV[2]) or 0)
-- A copy of a join must not end the connection that it has begun, nor a later one.
if call > 0 and call <= last then
  return {'ok', generation_of(ARGV[2]), now_ms(), last}
end
if most > 0 and redis.call('HLEN', RUN .. ':members') >= most
    and redis.call('HEXISTS', RUN .. ':members', ARGV[2]) == 0 then
  return {'full'}
end
local now = now_ms()
local generation = redis.call('HINCRBY', RUN, 'generation', 1)
redis.call('HSET', RUN .. ':generations', ARGV[2], generation)
redis.call('HSET', joins, ARGV[2], call)
redis.call('HSET', RUN .. ':members', ARGV[2], ARGV[4])
redis.call('SADD', RUN .. ':role:' .. ARGV[6], ARGV[2])
redis.call('ZADD', RUN .. ':heartbeats', now, ARGV[2])
for _, name in ipairs({'train', 'eval'}) do
  load_table(name)
  redis.call('ZADD', table_key .. ':holders', 'XX', now + counters.lease_ms, ARGV[2])
end
return {'ok', generation, now, call}
