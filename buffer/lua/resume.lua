-- Takes the run over under the next incarnation from version k: uses below k are trained, later ones are undone.
-- ARGV: member, k, takeover, force, learner lease in ms, call (its number, that grows with each of a member)
load_table(ARGV[1])
load_run()
free_first()
local member, k = ARGV[2], tonumber(ARGV[3])
local now, call, resumes = now_ms(), tonumber(ARGV[7]), RUN .. ':resumes'
-- Each member's last attempt, and the answer to it. A copy of it gets the same answer however late it comes; one of an
-- earlier attempt is refused. Neither may fence the learner in force.
local last = redis.call('HGET', resumes, member)
if last then
  local number, at, given = cmsgpack.unpack(last)
  if call < number or (call == number and at ~= k) then return {'outdated', snapshot()} end
  if call == number then return {'ok', snapshot(), unpack(given)} end
end
if run.learner ~= '' and run.learner ~= member and run.learner_until > now and ARGV[4] ~= '1' then
  return {'held', snapshot(), run.learner, run.learner_until - now}
end
if suspect() then
  -- The caller may speak for its predecessor now: it reports again what that one has used, and comes back.
  redis.call('HSET', RUN, 'learner', member, 'learner_until', now + tonumber(ARGV[6]))
  return {'suspect', snapshot()}
end
if k < run.committed and ARGV[5] ~= '1' then return {'below_commit', snapshot(), run.committed} end
local incarnation = run.incarnation + 1
local trained, returned, evicted = take_over(incarnation, k, member, now + tonumber(ARGV[6]))
local given = {incarnation, trained, returned, evicted, counters.seeded}
redis.call('HSET', resumes, member, cmsgpack.pack(call, k, given))
local train_view = snapshot()
-- Evaluation rounds belong to versions of the old learner.
if ARGV[1] ~= 'eval' then
  load_table('eval')
  withdraw_all()
  touch()
  for _, gid in ipairs(redis.call('ZRANGE', set_of('consumed'), 0, -1)) do
    finish(gid, read_group(gid), 'failed', 'withdrawn', false)
  end
  flush()
end
return {'ok', train_view, unpack(given)}
