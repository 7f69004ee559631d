-- The learner reports again which groups it has used, since Redis may have lost acknowledged writes. It reports in
-- portions, and the last one ends the doubt; repeating one changes nothing more.
-- ARGV: incarnation, member, version in force, learner lease in ms, more (1/0), doubt, number of takeovers, then
-- takeovers, then uses. `doubt` is the one that this is about; 0 asks which there is. A takeover is its incarnation and
-- k, ascending. A use is gid, train version and ordinal, oldest first.
-- Answer: groups corrected, unknown, the doubt in force
--
-- A group may be unknown here for two reasons only. Its end is known: then its use lies below the commit mark, and is
-- passed over. Or its admission is lost: then it is counted as admitted and consumed, and its prompt is not pending.
load_table(ARGV[1])
load_run()
free_first()
local now = now_ms()
-- Without rules (all is gone) a front has to write them first.
if counters.groups_per_step == 0 then return {'suspect', snapshot()} end
detect_restart(now)
local incarnation, member, version = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local takeovers, first = {}, 9 + 2 * tonumber(ARGV[8])
for i = 9, first - 1, 2 do takeovers[tonumber(ARGV[i])] = tonumber(ARGV[i + 1]) end

-- A learner is believed if its log continues what Redis knows.
if incarnation < run.incarnation or (incarnation == run.incarnation and run.learner ~= member) then
  return {'fenced', snapshot()}
end
for i, k in pairs(takeovers) do
  if i <= run.incarnation and (resumed_at(i) or k) ~= k then return {'fenced', snapshot()} end
end

-- A takeover that is lost is a loss as well.
if incarnation > run.incarnation and not run.suspect then
  mark_suspect()
  touch()
end
-- A report on another doubt comes from before a further loss, or that one is over: the learner begins again.
local doubt = tonumber(run.suspect or 0)
if ARGV[7] == '0' then return {'ok', snapshot(), 0, 0, doubt} end
if tonumber(ARGV[7]) ~= doubt then return {'suspect', snapshot()} end

-- By the ordinal of their prompt, once it is needed: live unclaimed groups, and failed ones with a kept prompt.
local owners, buried

-- Repeats takeovers that are lost, as far as they lie before a use at version `at` (all of them, without one).
local function catch_up(at)
  while run.incarnation < incarnation do
    local k, least = nil, NO_BOUND
    for later = run.incarnation + 1, incarnation do
      k = k or takeovers[later]
      least = math.min(least, takeovers[later] or NO_BOUND)
    end
    if at and at < least then return end
    take_over(run.incarnation + 1, k, member, now + tonumber(ARGV[5]))
    owners, buried = nil, nil
  end
end

-- Brings a prompt back to where the lost admission took it from. The group whose eviction queued it again may still be
-- alive here. Or the failed group that was driven again may be unaware of that.
local function release_prompt(ordinal)
  if ordinal > counters.seeded then return end
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
      apply_moves()
    end
    return
  end
  if not buried then
    buried = {}
    for _, gid in ipairs(redis.call('LRANGE', table_key .. ':failures', 0, -1)) do
      local note = cjson.decode(redis.call('HGET', table_key .. ':dead', gid))
      if note.kept then buried[note.ordinal] = {gid, note} end
    end
  end
  local found = buried[ordinal]
  if found and found[2].kept then redrive(found[1], found[2]) end
end

local function pending_entry(ordinal)
  return redis.call('ZRANGEBYSCORE', pending_key(''), ordinal, ordinal, 'LIMIT', 0, 1)[1]
end

-- A group with a lost admission. Its payload is gone: `payload_lost`.
local function recreate(gid, ordinal)
  local number = number_of(gid)
  local g = {
    state = 'consumed', ordinal = ordinal, n = 0, pin = '', reserve = 0, task = '', parent = '', refills = 0,
    order = number, attempt = 0, lost = 0, lease = '', holder = '', leased_ms = 0, done = '', bytes = 0, ranges = '',
    payloads = '', tokens = 0, grant = incarnation .. ':0', admitted_ms = now, sealed_ms = now, for_version = 0,
    deadline = 0, payload_lost = true
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
    if ordinal > counters.seeded then redis.call('HSET', table_key .. ':used', ordinal, gid) end
  end
  if number > counters.seq then
    add('skipped', number - counters.seq)
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
    g.payload_lost = true
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
  if at < run.committed then return end
  if at >= counters.u then put('u', at + 1) end
  local g = read_group(gid)
  if g then
    for _, used in ipairs(g.uses or {}) do
      if used == at then return end
    end
    corrected = corrected + 1
  else
    unknown = unknown + 1
    g = recreate(gid, ordinal)
  end
  local uses = {at}
  for _, used in ipairs(g.uses or {}) do uses[#uses + 1] = used end
  table.sort(uses)
  local was = g.state == 'consumed'
  local again = not was and g.state ~= 'generating' and #uses < counters.max_reuse and g.deadline > uses[#uses]
  redis.call('ZREM', table_key .. ':deadline', gid)
  redis.call('ZREM', table_key .. ':reuse', gid)
  set_uses(g, uses, was, not again)
  if again then
    if g.state == 'ready' then leave_ready(g) end
    make_ready(gid, g)
    save_group(gid, g)
    apply_moves()
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

-- Ids, leases and attempts that may have been given in the time that is lost do not come again. Nor do revisions, so
-- that no front that saw them takes what follows for a further loss. Leases, which fence what comes late, follow the
-- clock: they differ even where the same state is lost twice.
local function skip_numbers()
  add('rev', ID_GAP_AFTER_LOSS)
  add('seq', ID_GAP_AFTER_LOSS)
  add('skipped', ID_GAP_AFTER_LOSS)
  put('leases', math.max(counters.leases + ID_GAP_AFTER_LOSS, now))
  add('losses', 1)
end

if ARGV[6] == '0' then
  catch_up(nil)
  redis.call('HDEL', RUN, 'suspect')
  redis.call('HSET', RUN, 'learner', member, 'learner_until', now + tonumber(ARGV[5]), 'finished', 0)
  if version > run.version then redis.call('HSET', RUN, 'version', version) end
  load_run()
  if version > counters.u then put('u', version) end
  skip_numbers()
  flush()
  load_table('eval')
  skip_numbers()
  flush()
  load_table(ARGV[1])
end
return {'ok', snapshot(), corrected, unknown, doubt}
