-- Begins a front: writes the rules of all tables and the configuration that members receive. It writes nothing if
-- another front that is alive follows different rules. All or nothing, in one step: a front that begins at the same
-- time sees either no rules or all of them.
-- ARGV: '', front, member ttl in ms, sole (1: no other can be alive), configuration, rules by table as JSON, secret.
-- The secret is for the names of leases, if the run has none.
-- Answer: ok, the configuration in force (where others are alive, theirs).
-- Answer where rules differ: differs, table, then name, value there and value here of each rule.
load_run()
if run.incarnation == 0 then redis.call('HSET', RUN, 'redis_run_id', redis_id()) end
local front, now = ARGV[2], now_ms()
local alone = true
for _, other in ipairs(redis.call('SMEMBERS', RUN .. ':fronts')) do
  local beat = tonumber(redis.call('ZSCORE', RUN .. ':heartbeats', other) or -1)
  if other ~= front then
    -- One that lives after all hears so at its next heartbeat, and enters again: until then it gets no hints.
    if ARGV[4] == '1' or beat + tonumber(ARGV[3]) < now then forget(other) else alone = false end
  end
end
local tables = cjson.decode(ARGV[6])
if not alone then
  for _, name in ipairs({'train', 'eval'}) do
    load_table(name)
    local rules, differing = tables[name], {}
    for rule, value in pairs(rules) do
      if counters[rule] ~= value then differing[#differing + 1] = {rule, tostring(counters[rule]), tostring(value)} end
    end
    if #differing > 0 then return {'differs', name, differing} end
  end
end
for name, rules in pairs(tables) do redis.call('HSET', RUN .. ':' .. name, 'rules', cmsgpack.pack(rules)) end
local present = not alone and redis.call('GET', RUN .. ':config')
if not present then redis.call('SET', RUN .. ':config', ARGV[5]) end
if not run.lease_secret then redis.call('HSET', RUN, 'lease_secret', ARGV[7]) end
list_fronts('SADD', front)
redis.call('ZADD', RUN .. ':heartbeats', now, front)
return {'ok', present or ARGV[5]}
