-- Counters, and the same numbers recounted from the state sets. ARGV: number of failed groups to list
load_table(ARGV[1])
load_run()
local pending = redis.call('ZCARD', pending_key(''))
for _, pin in ipairs(redis.call('SMEMBERS', table_key .. ':pins')) do
  pending = pending + redis.call('ZCARD', pending_key(pin))
end
local recount = {
  'generating', redis.call('ZCARD', set_of('generating')), 'ready', redis.call('ZCARD', set_of('ready')),
  'leased', redis.call('ZCARD', set_of('leased')), 'consumed', redis.call('ZCARD', set_of('consumed')),
  'pending', pending, 'admitted', counters.seq - counters.skipped
}
local names = {
  'admitted', 'trained', 'evicted_stale', 'filtered', 'failed', 'generating', 'ready', 'leased', 'consumed',
  'seeded_tasks', 'pending', 'withdrawn', 'first_admissions', 'readmissions', 'superseded_writes', 'duplicate_writes',
  'uses', 'redriven', 'cancelled'
}
local counted = {}
for _, name in ipairs(names) do
  counted[#counted + 1] = name
  counted[#counted + 1] = counters[name]
end
local limit = tonumber(ARGV[2])
local failures = limit > 0 and redis.call('LRANGE', table_key .. ':failures', 0, limit - 1) or {}
if #failures > 0 then failures = redis.call('HMGET', table_key .. ':dead', unpack(failures)) end
return {'ok', snapshot(), counted, recount, redis.call('HGETALL', table_key .. ':reasons'), failures}
