-- What all verbs share: the figures of run and table, and the transitions between states.
--
-- KEYS[1]  the run's hash; every other key of metadata begins with it and so lies in the same cluster slot
-- ARGV[1]  the table (`train`, `eval`), or '' where a verb concerns the run alone
--
-- Invariants
--   * A group is in exactly one of the sets generating, ready, leased, consumed; the counter of the same name in
--     the table's hash moves in the same script. A fate removes the group and counts it, once.
--   * `deadline` holds the groups that are generating or ready and wait for their first use, scored by the last version
--     that may train them; ready groups that have been used before are in `reuse` instead, scored alike.
--   * Keys of payloads and prompts live in other slots: scripts only note them in `trash`, a front removes them.
--   * `rev` grows with every change, so that a front can tell which of two answers is newer.
local RUN = KEYS[1]
local NO_BOUND = 10000000000000
local FIGURES = {
  'rev', 'seq', 'leases', 'seals', 'u', 'admitted', 'trained', 'evicted_stale', 'filtered', 'failed', 'generating',
  'ready', 'leased', 'consumed', 'seeded', 'seeded_tasks', 'pending', 'withdrawn', 'first_admissions',
  'readmissions', 'superseded_writes', 'duplicate_writes', 'end_of_data', 'bytes', 'reserved', 'orphaned',
  'uses', 'spent', 'race', 'weight', 'cancelled', 'redriven', 'skipped', 'consumed_bytes',
  -- The rules.
  'groups_per_step', 'max_staleness', 'bounded', 'order', 'max_reuse', 'samples_per_insert', 'seed', 'min_members',
  'lease_ms', 'grace_ms', 'max_bytes', 'max_attempts'
}
-- Orders of sampling, as buffer.policy.rules numbers them.
local IN_ORDER, FRESHEST, PRIORITY = 0, 2, 3
local WEIGHT_UNIT = 1000000
-- `dirty`, `ended` (fates by reason) and `trash` are written by `flush`.
local T, C, dirty, ended, trash, R

local function load_table(name)
  T, C, dirty, ended, trash = RUN .. ':' .. name, {}, {}, {}, {}
  local values = redis.call('HMGET', T, unpack(FIGURES))
  for i = 1, #FIGURES do C[FIGURES[i]] = tonumber(values[i] or 0) end
end

local function load_run()
  R = {}
  local flat = redis.call('HGETALL', RUN)
  for i = 1, #flat, 2 do R[flat[i]] = flat[i + 1] end
  for _, field in ipairs({'incarnation', 'version', 'learner_until', 'committed', 'finished'}) do
    R[field] = tonumber(R[field] or 0)
  end
  R.learner = R.learner or ''
end

local function add(field, by)
  if by == 0 then return end
  C[field] = C[field] + by
  dirty[field] = true
end

local function put(field, value)
  if C[field] ~= value then
    C[field] = value
    dirty[field] = true
  end
end

-- Has the waiters look again although no figure of this table changed.
local function touch() dirty.rev = true end

-- Runs a command over many members of one key (or score, member pairs): far cheaper than a command for each.
local function over(command, key, members)
  for i = 1, #members, 1000 do redis.call(command, key, unpack(members, i, math.min(i + 999, #members))) end
end

-- Writes the changed figures and hints to all fronts that there is something new.
local function flush()
  local flat = {}
  if next(dirty) == nil then return end
  add('rev', 1)
  for reason, count in pairs(ended) do redis.call('HINCRBY', T .. ':reasons', reason, count) end
  over('SADD', T .. ':trash', trash)
  for field in pairs(dirty) do
    flat[#flat + 1] = field
    flat[#flat + 1] = C[field]
  end
  redis.call('HSET', T, unpack(flat))
  redis.call('PUBLISH', RUN .. ':wake', string.match(T, '[^:]*$') .. ' ' .. C.rev)
  dirty, ended, trash = {}, {}, {}
end

-- Uses that the unclaimed groups demand: what the gate counts. Their number, where each is used once.
local function demand() return C.samples_per_insert * (C.generating + C.ready + C.leased) - C.spent end

local function first_of(set)
  return tonumber(redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2] or NO_BOUND)
end

-- The figures as every answer carries them; writes what has changed first.
local function view()
  flush()
  local first = first_of(T .. ':deadline')
  if C.spent > 0 then first = math.min(first, first_of(T .. ':reuse')) end
  return {
    C.rev, R.incarnation, R.version, C.u, C.generating, C.ready, C.leased, C.consumed, C.pending, C.end_of_data,
    C.bytes, C.reserved, C.orphaned, C.cancelled, first, demand(),
    R.suspect == '1' and 1 or 0
  }
end

local function redis_id() return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') end

-- Whether Redis may have lost what it had acknowledged: it is another process than the run knows (restarted, its data
-- replaced or gone), or a front saw figures go back. Then nobody gets anything until the learner has said again what
-- it has used (`reassert`): neither ids nor leases of the lost time may come a second time.
local function suspect() return R.suspect == '1' or R.redis_run_id ~= redis_id() end

-- Why a learner's verb is refused, or nil. An incarnation that is not known yet is one whose takeover Redis has lost.
local function refusal(incarnation)
  if incarnation < R.incarnation then return 'fenced' end
  if incarnation > R.incarnation or suspect() then return 'suspect' end
end

local function set_of(state) return T .. ':' .. state end
local function held_by(holder) return T .. ':held:' .. holder end
local function group_key(gid) return T .. ':g:' .. gid end
local function pending_key(pin) return T .. ':pending:' .. pin end
local function orphans_key(pin) return T .. ':orphans:' .. pin end

-- A group's hash: all that is known of it, packed into one field, and one field per member for its meta. Packing
-- costs a fraction of what a field for every figure would.
local function read_group(gid)
  local packed = redis.call('HGET', group_key(gid), 'group')
  return packed and cmsgpack.unpack(packed) or nil
end

local function save_group(gid, g) redis.call('HSET', group_key(gid), 'group', cmsgpack.pack(g)) end

-- Version on the present lineage to which tokens of (incarnation, version) are equivalent: what a later learner
-- discarded counts its way back to the common ancestor and forth again.
local function effective(incarnation, version)
  local ancestor = nil
  for later = incarnation + 1, R.incarnation do
    local k = tonumber(R['k:' .. later] or 0)
    if ancestor == nil or k < ancestor then ancestor = k end
  end
  if ancestor ~= nil and version > ancestor then return 2 * ancestor - version end
  return version
end

-- `ranges` is "incarnation:lowest:highest" per incarnation, joined by ';': all versions of the stored members.
local function parse_ranges(text)
  local ranges = {}
  for inc, low, high in string.gmatch(text, '(%d+):(%d+):(%d+)') do
    ranges[inc] = {tonumber(low), tonumber(high)}
  end
  return ranges
end

local function merge_ranges(left, right)
  if left == '' or left == right then return right end
  local ranges = parse_ranges(left)
  for inc, pair in pairs(parse_ranges(right)) do
    local known = ranges[inc] or pair
    ranges[inc] = {math.min(known[1], pair[1]), math.max(known[2], pair[2])}
  end
  local names, parts = {}, {}
  for inc in pairs(ranges) do names[#names + 1] = inc end
  table.sort(names, function(a, b) return tonumber(a) < tonumber(b) end)
  for i, inc in ipairs(names) do parts[i] = inc .. ':' .. ranges[inc][1] .. ':' .. ranges[inc][2] end
  return table.concat(parts, ';')
end

-- Last version at which the group may train; counts the version at the grant while it is being generated.
local function deadline_of(g)
  if C.bounded == 0 then return NO_BOUND end
  -- Nearly always: all tokens of the present incarnation, in one range, and the grant no older.
  local inc, low = string.match(g.ranges, '^(%d+):(%d+):%d+$')
  if inc and tonumber(inc) == R.incarnation and g.state ~= 'generating' then return tonumber(low) + C.max_staleness end
  local oldest = nil
  local function see(incarnation, version)
    local e = effective(tonumber(incarnation), tonumber(version))
    if oldest == nil or e < oldest then oldest = e end
  end
  for inc, low, high in string.gmatch(g.ranges, '(%d+):(%d+):(%d+)') do
    see(inc, low)
    see(inc, high)
  end
  if g.state == 'generating' or oldest == nil then
    local inc, version = string.match(g.grant, '(%d+):(%d+)')
    see(inc, version)
  end
  return oldest + C.max_staleness
end

-- Uses: the train versions of the group's claims on the surviving lineage, ascending; absent while it has none.
local function use_count(g) return g.uses and #g.uses or 0 end
local function last_use(g) return g.uses[#g.uses] end
local function waiting_set(g) return T .. (g.uses and ':reuse' or ':deadline') end
-- Uses that an unclaimed group does not demand of the gate any more.
local function spent(g) return math.min(use_count(g), C.samples_per_insert) end

-- Changes the uses of a group; `claimed`: before and after, whether it counts as consumed.
local function set_uses(g, uses, was_consumed, is_consumed)
  local before = was_consumed and 0 or spent(g)
  add('uses', #uses - use_count(g))
  g.uses = #uses > 0 and uses or nil
  add('spent', (is_consumed and 0 or spent(g)) - before)
end

-- Enters a ready group into the race by which weighted draws are made (buffer.policy.reuse).
local function enter_race(gid, g)
  g.draws = (g.draws or 0) + 1
  local digest = redis.sha1hex(gid .. ':' .. g.draws .. ':' .. C.seed)
  local uniform = (tonumber(string.sub(digest, 1, 13), 16) + 0.5) / 16 ^ 13
  g.order = C.race - math.log(uniform) / (g.weight or WEIGHT_UNIT) * WEIGHT_UNIT
end

-- The place of a group that becomes ready among the others.
local function take_place(gid, g)
  if C.order == FRESHEST then
    g.order = g.seal / 2 ^ 32 - g.deadline
  elseif C.order == PRIORITY then
    add('weight', g.weight or WEIGHT_UNIT)
    enter_race(gid, g)
  end
end

-- A ready group leaves the table of candidates.
local function leave_ready(g)
  if C.order == PRIORITY then add('weight', -(g.weight or WEIGHT_UNIT)) end
end

local function generation_of(member)
  return tonumber(redis.call('HGET', RUN .. ':generations', member) or -1)
end

-- Leases that a member works on and that nobody needs any more, as "gid lease", until it has been told.
local function cancels_key(member) return T .. ':cancels:' .. member end

-- Tells whoever works on a group that it need not: its holder, or the one who lost it and may still be at it.
local function cancel(gid, g)
  local worker = g.holder ~= '' and g.holder or g.former or ''
  if worker == '' or generation_of(worker) < 0 then return end
  redis.call('SADD', cancels_key(worker), gid .. ' ' .. g.lease)
  add('cancelled', 1)
end

-- Drafts: what was sampled of members that are not done, in the fields d0, d1, ... of the group's hash, each "attempt
-- tokens ranges"; `g.drafts` counts them, absent where there is none. A draft's name is "member:attempt:tokens".
local function read_draft(gid, member)
  local text = redis.call('HGET', group_key(gid), 'd' .. member)
  if not text then return nil end
  local attempt, tokens, ranges = string.match(text, '(%d+) (%d+) (.*)')
  local name = member .. ':' .. attempt .. ':' .. tokens
  return {attempt = tonumber(attempt), tokens = tonumber(tokens), ranges = ranges, name = name}
end

local function drop_draft(gid, g, member)
  redis.call('HDEL', group_key(gid), 'd' .. member)
  g.drafts = g.drafts > 1 and g.drafts - 1 or nil
end

local function drafts_of(gid, g)
  local drafts = {}
  if not g.drafts then return drafts end
  for member = 0, g.n - 1 do drafts[#drafts + 1] = read_draft(gid, member) end
  return drafts
end

-- Counts an evicted group by the response tokens that were stored of it: by the least power of two not below them.
local function count_length(g, drafts)
  local tokens, class = g.tokens or 0, 1
  for _, draft in ipairs(drafts) do tokens = tokens + draft.tokens end
  while class < tokens do class = 2 * class end
  redis.call('HINCRBY', T .. ':evicted_tokens', class, 1)
end

-- Notes a failed group with its cause; the oldest note makes room. A note keeps its prompt until it is driven again,
-- except where the learner itself took the task back. Returns whether it does.
local function bury(gid, g, reason)
  local kept = reason ~= 'withdrawn' and g.n > 0
  redis.call('HSET', T .. ':dead', gid, cjson.encode({
    group = gid, task = g.task, reason = reason, attempts = g.attempt, failed_ms = now_ms(), causes = g.causes,
    ordinal = g.ordinal, n = g.n, pin = g.pin, reserve = g.reserve, kept = kept, redriven = false
  }))
  redis.call('LPUSH', T .. ':failures', gid)
  while redis.call('LLEN', T .. ':failures') > tonumber(redis.call('HGET', T, 'failed_kept')) do
    local oldest = redis.call('RPOP', T .. ':failures')
    local note = cjson.decode(redis.call('HGET', T .. ':dead', oldest))
    redis.call('HDEL', T .. ':dead', oldest)
    if note.kept then redis.call('SADD', T .. ':trash', '|' .. note.ordinal .. '||') end
  end
  return kept
end

-- A member is gone: what it would have been told goes with it, and the stream that a dead front has left open.
local function forget(member)
  redis.call('ZREM', RUN .. ':heartbeats', member)
  for _, part in ipairs({':members', ':status', ':generations'}) do redis.call('HDEL', RUN .. part, member) end
  for _, name in ipairs({'train', 'eval'}) do
    redis.call('DEL', RUN .. ':' .. name .. ':cancels:' .. member)
    redis.call('HDEL', RUN .. ':' .. name .. ':streams', member)
  end
end

local function leave_holder(gid, g)
  if g.holder ~= '' then redis.call('SREM', held_by(g.holder), gid) end
  if g.orphan then
    redis.call('ZREM', orphans_key(g.pin), gid)
    add('orphaned', -1)
  end
  g.holder, g.orphan = '', false
end

-- Ends a group with its fate and notes its payloads for removal. `requeue` gives its prompt another group.
local function finish(gid, g, fate, reason, requeue)
  if g.state == 'generating' and string.find(g.done, '0', 1, true) then cancel(gid, g) end
  redis.call('ZREM', set_of(g.state), gid)
  if g.state ~= 'consumed' then redis.call('ZREM', T .. ':deadline', gid) end
  leave_holder(gid, g)
  add(g.state, -1)
  add(fate, 1)
  ended[fate .. '/' .. reason] = (ended[fate .. '/' .. reason] or 0) + 1
  add('bytes', -g.bytes)
  if g.state == 'consumed' then add('consumed_bytes', -g.bytes) end
  if g.state == 'generating' then add('reserved', -g.reserve) end
  if g.state == 'ready' then leave_ready(g) end
  if g.uses and g.state ~= 'consumed' then
    redis.call('ZREM', T .. ':reuse', gid)
    add('spent', -spent(g))
  end
  local prompt = g.unseeded and '' or g.ordinal
  local refills = g.refills + 1
  if requeue and refills <= C.max_attempts then
    prompt = ''
    local entry = cjson.encode({g.ordinal, g.n, g.pin, g.reserve, g.task, gid, refills})
    redis.call('ZADD', pending_key(g.pin), g.ordinal, entry)
    add('pending', 1)
    add('seeded_tasks', 1)
  end
  local drafts, names = drafts_of(gid, g), {}
  for i, draft in ipairs(drafts) do names[i] = draft.name end
  if fate == 'evicted_stale' then count_length(g, drafts) end
  if fate == 'failed' and bury(gid, g, reason) then prompt = '' end
  trash[#trash + 1] = gid .. '|' .. prompt .. '|' .. g.payloads .. '|' .. table.concat(names, ',')
  redis.call('DEL', group_key(gid))
end

-- A group that may not be used any more but has been: consumed until its last use is committed, then trained.
local function retire(gid, g)
  if last_use(g) < R.committed then return finish(gid, g, 'trained', 'committed', false) end
  redis.call('ZREM', set_of(g.state), gid)
  redis.call('ZREM', T .. ':reuse', gid)
  leave_holder(gid, g)
  if g.state == 'ready' then leave_ready(g) end
  add('spent', -spent(g))
  add(g.state, -1)
  add('consumed', 1)
  add('consumed_bytes', g.bytes)
  g.state, g.lease = 'consumed', ''
  redis.call('ZADD', set_of('consumed'), last_use(g), gid)
  save_group(gid, g)
end

-- Ends a group that nobody will train (again).
local function give_up(gid, g, fate, reason)
  if g.uses and g.state ~= 'consumed' then return retire(gid, g) end
  finish(gid, g, fate, reason, false)
end

-- Back to ready, from generating (sealed), leased or consumed.
local function make_ready(gid, g)
  redis.call('ZREM', set_of(g.state), gid)
  leave_holder(gid, g)
  add(g.state, -1)
  add('ready', 1)
  if g.state == 'consumed' then add('consumed_bytes', -g.bytes) end
  if g.state == 'generating' then add('reserved', -g.reserve) end
  g.state, g.lease = 'ready', ''
  g.deadline = deadline_of(g)
  take_place(gid, g)
  redis.call('ZADD', set_of('ready'), g.order, gid)
  redis.call('ZADD', waiting_set(g), g.deadline, gid)
  save_group(gid, g)
end

-- Takes a generating group from its holder; it waits for the next one, or fails when it has lost too many.
local function orphan(gid, g, lost)
  if g.lost + lost >= C.max_attempts then
    finish(gid, g, 'failed', 'attempts_exhausted', false)
    return
  end
  -- Who gives a group up knows that it does; who has lost it may come back.
  if g.holder ~= '' then g.former = lost > 0 and g.holder or nil end
  leave_holder(gid, g)
  redis.call('ZADD', orphans_key(g.pin), g.seq, gid)
  add('orphaned', 1)
  g.lost, g.orphan = g.lost + lost, true
  save_group(gid, g)
end

-- Whether a stream has been replaced by a newer one of the same holder, maybe at another front: then it may take
-- nothing more in its holder's name, since nobody would hear of it. No token, no stream: the caller is trusted.
local function replaced(holder, token)
  return token ~= '' and redis.call('HGET', T .. ':streams', holder) ~= token
end

-- Over its memory limit Redis refuses a script whose first write needs memory, and lets one go on whose first write
-- frees some. Verbs that lead out of that state, or keep what there is, begin with such a write.
local function free_first() redis.call('DEL', RUN .. ':none') end

-- Gives everything a holder has its full term.
local function renew(holder, now)
  redis.call('ZADD', T .. ':holders', now + C.lease_ms, holder)
end
