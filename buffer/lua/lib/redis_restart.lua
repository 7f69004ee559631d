-- Shared by `expire` and `reassert`: sees whether Redis is another process than the run knows. If so, every lease and
-- every member gets one full term, since no holder could renew. The learner then has to report again what it has used.
local function detect_restart(now)
  local run_id = redis_id()
  if run.redis_run_id == run_id then return false end
  redis.call('HSET', RUN, 'redis_run_id', run_id)
  run.redis_run_id = run_id
  if run.incarnation > 0 then
    mark_suspect()
  end
  for _, name in ipairs({'train', 'eval'}) do
    load_table(name)
    for _, holder in ipairs(redis.call('ZRANGE', table_key .. ':holders', 0, -1)) do renew(holder, now) end
    touch()
    flush()
  end
  load_table(ARGV[1])
  if run.learner_until > 0 then redis.call('HSET', RUN, 'learner_until', now + counters.lease_ms) end
  for _, member in ipairs(redis.call('ZRANGE', RUN .. ':heartbeats', 0, -1)) do
    redis.call('ZADD', RUN .. ':heartbeats', now, member)
  end
  return true
end
