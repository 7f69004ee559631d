-- Counters, and the same figures counted anew from the state sets. ARGV: number of failed groups to list
load_table(ARGV[1])
load_run()
local pending = redis.call('ZCARD', pending_key(''))
for _, pin in ipairs(redis.call('SMEMBERS', T .. ':pins')) do
  pending = pending + redis.call('ZCARD', pending_key(pin))
end
local recount = {
  'generating', redis.call('ZCARD', set_of('generating')), 'ready', redis.call('ZCARD', set_of('ready')),
  'leased', redis.call('ZCARD', set_of('leased')), 'consumed', redis.call('ZCARD', set_of('consumed')),
  'pending', pending, 'admitted', C.seq - C.skipped
}
local names = {
  'admitted', 'trained', 'evicted_stale', 'filtered', 'failed', 'generating', 'ready', 'leased', 'consumed',
  'seeded_tasks', 'pending', 'withdrawn', 'first_admissions', 'readmissions', 'superseded_writes', 'duplicate_writes',
  'uses', 'redriven', 'cancelled'
}
local counters = {}
for _, name in ipairs(names) do
  counters[#counters + 1] = name
  counters[#counters + 1] = C[name]
end
local limit = tonumber(ARGV[2])
local failures = limit > 0 and redis.call('LRANGE', T .. ':failures', 0, limit - 1) or {}
if #failures > 0 then failures = redis.call('HMGET', T .. ':dead', unpack(failures)) end
return {'ok', view(), counters, recount, redis.call('HGETALL', T .. ':reasons'), failures}
