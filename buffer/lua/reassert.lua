-- The learner says again which groups it has used, since Redis may have lost what it had acknowledged. In portions, of
-- which the last one ends the doubt; repeating one changes nothing more.
-- ARGV: incarnation, member, version in force, learner lease in ms, more (1/0), the doubt that this is about (0: asks
-- which there is), number of takeovers, then incarnation and k of each, ascending, then gid, train version, ordinal per
-- use, oldest first. Answer: groups corrected, unknown, the doubt in force
--
-- A group may be unknown here for two reasons only. Its end is known: then its use lies below the commit mark, and is
-- passed over. Or its admission is lost: then it is counted as admitted and consumed, and its prompt is not pending.
load_table(ARGV[1])
load_run()
free_first()
local now = now_ms()
-- Without rules (all is gone) a front has to write them first.
if C.groups_per_step == 0 then return {'suspect', view()} end
recognize(now)
local incarnation, member, version = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local takeovers, first = {}, 9 + 2 * tonumber(ARGV[8])
for i = 9, first - 1, 2 do takeovers[tonumber(ARGV[i])] = tonumber(ARGV[i + 1]) end

-- Believed is who continues what Redis knows.
if incarnation < R.incarnation or (incarnation == R.incarnation and R.learner ~= member) then
  return {'fenced', view()}
end
for i, k in pairs(takeovers) do
  if i <= R.incarnation and (resumed_at(i) or k) ~= k then return {'fenced', view()} end
end

-- A takeover that is lost is a loss as well.
if incarnation > R.incarnation and not R.suspect then
  begin_doubt()
  touch()
end
-- What is said of another doubt comes from before a further loss, or that one is over: the learner begins again.
local doubt = tonumber(R.suspect or 0)
if ARGV[7] == '0' then return {'ok', view(), 0, 0, doubt} end
if tonumber(ARGV[7]) ~= doubt then return {'suspect', view()} end

-- By the ordinal of their prompt, once somebody has asked: live unclaimed groups, and failed ones whose prompt is kept.
local owners, buried

-- Makes up for takeovers that are lost, as far as they lie before a use at version `at` (all of them, without one).
local function catch_up(at)
  while R.incarnation < incarnation do
    local k, least = nil, NO_BOUND
    for later = R.incarnation + 1, incarnation do
      k = k or takeovers[later]
      least = math.min(least, takeovers[later] or NO_BOUND)
    end
    if at and at < least then return end
    go_on(R.incarnation + 1, k, member, now + tonumber(ARGV[5]))
    owners, buried = nil, nil
  end
end

-- Brings a prompt back to where the lost admission took it from: the group whose eviction queued it again may still be
-- alive here, or the failed group that was driven again may be unaware of that.
local function release_prompt(ordinal)
  if ordinal > C.seeded then return end
  if not owners then
    owners = {}
    for _, state in ipairs({'generating', 'ready', 'leased'}) do
      for _, gid in ipairs(redis.call('ZRANGE', set_of(state), 0, -1)) do owners[read_group(gid).ordinal] = gid end
    end
  end
  local owner = owners[ordinal]
  local g = owner and read_group(owner)
  if g then
    if g.state ~= 'consumed' and not g.uses then
      finish(owner, g, 'evicted_stale', 'lost_state', true)
      settle()
    end
    return
  end
  if not buried then
    buried = {}
    for _, gid in ipairs(redis.call('LRANGE', T .. ':failures', 0, -1)) do
      local note = cjson.decode(redis.call('HGET', T .. ':dead', gid))
      if note.kept then buried[note.ordinal] = {gid, note} end
    end
  end
  local found = buried[ordinal]
  if found and found[2].kept then drive_again(found[1], found[2]) end
end

local function pending_entry(ordinal)
  return redis.call('ZRANGEBYSCORE', pending_key(''), ordinal, ordinal, 'LIMIT', 0, 1)[1]
end

-- A group whose admission is lost. Its payload is gone: `hollow`.
local function invent(gid, ordinal)
  local number = number_of(gid)
  local g = {
    state = 'consumed', ordinal = ordinal, n = 0, pin = '', reserve = 0, task = '', parent = '', refills = 0,
    order = number, attempt = 0, lost = 0, lease = '', holder = '', leased_ms = 0, done = '', bytes = 0, ranges = '',
    payloads = '', tokens = 0, grant = incarnation .. ':0', admitted_ms = now, sealed_ms = now, for_version = 0,
    deadline = 0, hollow = true
  }
  if not pending_entry(ordinal) then release_prompt(ordinal) end
  local entry = pending_entry(ordinal)
  if entry then
    redis.call('ZREM', pending_key(''), entry)
    add('pending', -1)
    g.ordinal, g.n, g.pin, g.reserve, g.task, g.parent, g.refills = unpack(cmsgpack.unpack(entry))
    g.done = string.rep('0', g.n)
  else
    add('seeded_tasks', 1)
    if ordinal > C.seeded then redis.call('HSET', T .. ':used', ordinal, gid) end
  end
  if number > C.seq then
    add('skipped', number - C.seq)
    put('seq', number)
  end
  add('skipped', -1)
  add('admitted', 1)
  add('first_admissions', 1)
  add('consumed', 1)
  return g
end

-- No further use: consumed, until the last one is committed.
local function consume(gid, g)
  if g.state == 'generating' then
    g.hollow = true
    add('reserved', -g.reserve)
    if string.find(g.done, '0', 1, true) then cancel(gid, g) end
  elseif g.state == 'ready' then
    leave_ready(g)
  end
  redis.call('ZREM', set_of(g.state), gid)
  leave_holder(gid, g)
  add(g.state, -1)
  add('consumed', 1)
  add('consumed_bytes', g.bytes)
  g.state, g.lease = 'consumed', ''
end

local corrected, unknown = 0, 0
local function assert_use(gid, at, ordinal)
  if at < R.committed then return end
  if at >= C.u then put('u', at + 1) end
  local g = read_group(gid)
  if g then
    for _, used in ipairs(g.uses or {}) do
      if used == at then return end
    end
    corrected = corrected + 1
  else
    unknown = unknown + 1
    g = invent(gid, ordinal)
  end
  local uses = {at}
  for _, used in ipairs(g.uses or {}) do uses[#uses + 1] = used end
  table.sort(uses)
  local was = g.state == 'consumed'
  local again = not was and g.state ~= 'generating' and #uses < C.max_reuse and g.deadline > uses[#uses]
  redis.call('ZREM', T .. ':deadline', gid)
  redis.call('ZREM', T .. ':reuse', gid)
  set_uses(g, uses, was, not again)
  if again then
    if g.state == 'ready' then leave_ready(g) end
    make_ready(gid, g)
    save_group(gid, g)
    settle()
    return
  end
  if not was then consume(gid, g) end
  redis.call('ZADD', set_of('consumed'), uses[#uses], gid)
  save_group(gid, g)
end

for i = first, #ARGV, 3 do
  catch_up(tonumber(ARGV[i + 1]))
  assert_use(ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
end

-- Ids, leases and attempts that may have been given in the time that is lost do not come again; nor do revisions, so
-- that no front that saw them takes what follows for a further loss. Leases, which fence what comes late, follow the
-- clock: they differ even where the same state is lost twice.
local function leap()
  add('rev', LEAP)
  add('seq', LEAP)
  add('skipped', LEAP)
  put('leases', math.max(C.leases + LEAP, now))
  add('losses', 1)
end

if ARGV[6] == '0' then
  catch_up(nil)
  redis.call('HDEL', RUN, 'suspect')
  redis.call('HSET', RUN, 'learner', member, 'learner_until', now + tonumber(ARGV[5]), 'finished', 0)
  if version > R.version then redis.call('HSET', RUN, 'version', version) end
  load_run()
  if version > C.u then put('u', version) end
  leap()
  flush()
  load_table('eval')
  leap()
  flush()
  load_table(ARGV[1])
end
return {'ok', view(), corrected, unknown, doubt}
