-- A member lives: renews all leases it holds, except in a table where its standing stream is broken: there only the
-- stream's return restores them. ARGV: '', member, generation, status (serialized HeartbeatRequest),
-- incarnation (learner, else 0), learner lease in ms
load_run()
free_first()
local now = now_ms()
local member, incarnation = ARGV[2], tonumber(ARGV[5])
local known = generation_of(member) == tonumber(ARGV[3]) and 1 or 0
local fenced = (incarnation > 0 and incarnation < run.incarnation) and 1 or 0
if known == 1 and fenced == 0 then
  redis.call('HSET', RUN .. ':status', member, ARGV[4])
  redis.call('ZADD', RUN .. ':heartbeats', now, member)
  local holder = member
  if incarnation > 0 then
    redis.call('HSET', RUN, 'learner_until', now + tonumber(ARGV[6]))
    holder = 'learner'
  end
  for _, name in ipairs({'train', 'eval'}) do
    load_table(name)
    if redis.call('HEXISTS', table_key .. ':streams', holder) == 1 then
      redis.call('ZADD', table_key .. ':holders', 'XX', now + counters.lease_ms, holder)
    end
  end
end
local learner = run.learner ~= '' and redis.call('HGET', RUN .. ':members', run.learner) or ''
local status = run.learner ~= '' and redis.call('HGET', RUN .. ':status', run.learner) or ''
return {'ok', known, fenced, learner or '', status or '', run.incarnation, run.version, run.finished}
