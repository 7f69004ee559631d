-- A member leaves in order: its leases end at once. ARGV: '', member, generation, run finished (1/0)
load_run()
free_first()
local member = ARGV[2]
if generation_of(member) ~= tonumber(ARGV[3]) then return {'ok'} end
forget(member)
local is_learner = run.learner == member
if is_learner then
  redis.call('HSET', RUN, 'learner_until', 0)
  if ARGV[4] == '1' then redis.call('HSET', RUN, 'finished', 1) end
end
for _, name in ipairs({'train', 'eval'}) do
  load_table(name)
  local holder = is_learner and 'learner' or member
  for _, gid in ipairs(redis.call('ZRANGE', held_by(holder), 0, -1)) do
    end_lease(gid, read_group(gid), 0)
  end
  redis.call('ZREM', table_key .. ':holders', holder)
  flush()
end
return {'ok'}
