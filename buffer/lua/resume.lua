-- Takes the run over under the next incarnation from version k: uses below k are trained, later ones are undone.
-- ARGV: member, k, takeover, force, learner lease in ms
load_table(ARGV[1])
load_run()
free_first()
local member, k = ARGV[2], tonumber(ARGV[3])
local now = now_ms()
if R.learner ~= '' and R.learner ~= member and R.learner_until > now and ARGV[4] ~= '1' then
  return {'held', view(), R.learner, R.learner_until - now}
end
if suspect() then
  -- The caller may speak for its predecessor now: it says again what that one has used, and comes back.
  redis.call('HSET', RUN, 'learner', member, 'learner_until', now + tonumber(ARGV[6]))
  return {'suspect', view()}
end
if k < R.committed and ARGV[5] ~= '1' then return {'below_commit', view(), R.committed} end
local incarnation = R.incarnation + 1
local trained, returned, evicted = go_on(incarnation, k, member, now + tonumber(ARGV[6]))
local seeded = C.seeded
local train_view = view()
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
return {'ok', train_view, incarnation, trained, returned, evicted, seeded}
