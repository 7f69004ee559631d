-- A front begins: writes the rules of a table (they come from the configuration), unless another front that is alive
-- goes by different ones. ARGV: table, front, member ttl in ms, sole (1: no other can be alive), then field, value pairs
load_table(ARGV[1])
load_run()
if R.incarnation == 0 then redis.call('HSET', RUN, 'redis_run_id', redis_id()) end
local front, fronts, now = ARGV[2], RUN .. ':fronts', now_ms()
local others = {}
for _, other in ipairs(redis.call('SMEMBERS', fronts)) do
  local beat = tonumber(redis.call('ZSCORE', RUN .. ':heartbeats', other) or -1)
  if other ~= front then
    -- One that lives after all hears so at its next heartbeat, and enters again: till then nobody hints to it.
    if ARGV[4] == '1' or beat + tonumber(ARGV[3]) < now then forget(other) else others[#others + 1] = other end
  end
end
local rules, differing = {}, {}
for i = 5, #ARGV, 2 do
  local name, value = ARGV[i], tonumber(ARGV[i + 1])
  rules[name] = value
  if #others > 0 and C[name] ~= value then differing[#differing + 1] = {name, tostring(C[name]), ARGV[i + 1]} end
end
if #differing > 0 then return {'differs', others, differing} end
redis.call('HSET', T, 'rules', cmsgpack.pack(rules))
list_fronts('SADD', front)
redis.call('ZADD', RUN .. ':heartbeats', now, front)
return {'ok', others}
