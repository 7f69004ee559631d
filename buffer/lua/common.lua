-- What all verbs share: the figures of run and table, and the transitions between states.
--
-- KEYS[1]  the run's hash; every other key of metadata begins with it and so lies in the same cluster slot
-- ARGV[1]  the table (`train`, `eval`), or '' where a verb concerns the run alone
--
-- Invariants
--   * A group is in exactly one of the sets generating, ready, leased, consumed; the counter of the same name in
--     the table's hash moves in the same script. A fate removes the group and counts it, once.
--   * `deadline` holds the groups that are generating or ready, scored by the last version that may train them.
--   * Keys of payloads and prompts live in other slots: scripts only note them in `trash`, a front removes them.
--   * `rev` grows with every change, so that a front can tell which of two answers is newer.
local RUN = KEYS[1]
local NO_BOUND = 10000000000000
local FIGURES = {
  'rev', 'seq', 'leases', 'seals', 'u', 'admitted', 'trained', 'evicted_stale', 'filtered', 'failed', 'generating',
  'ready', 'leased', 'consumed', 'seeded', 'seeded_tasks', 'pending', 'withdrawn', 'first_admissions',
  'readmissions', 'superseded_writes', 'duplicate_writes', 'end_of_data', 'bytes', 'reserved', 'orphaned',
  'groups_per_step', 'max_staleness', 'bounded', 'fifo', 'min_members', 'lease_ms', 'grace_ms', 'max_bytes',
  'max_attempts'
}
local T, C, dirty, R

local function load_table(name)
  T, C, dirty = RUN .. ':' .. name, {}, {}
  local values = redis.call('HMGET', T, unpack(FIGURES))
  for i, field in ipairs(FIGURES) do C[field] = tonumber(values[i] or 0) end
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

-- Writes the changed figures and hints to all fronts that there is something new.
local function flush()
  local flat = {}
  if next(dirty) == nil then return end
  add('rev', 1)
  for field in pairs(dirty) do
    flat[#flat + 1] = field
    flat[#flat + 1] = C[field]
  end
  redis.call('HSET', T, unpack(flat))
  redis.call('PUBLISH', RUN .. ':wake', string.match(T, '[^:]*$') .. ' ' .. C.rev)
  dirty = {}
end

-- The figures as every answer carries them; writes what has changed first.
local function view()
  flush()
  local first = redis.call('ZRANGE', T .. ':deadline', 0, 0, 'WITHSCORES')
  return {
    C.rev, R.incarnation, R.version, C.u, C.generating, C.ready, C.leased, C.consumed, C.pending, C.end_of_data,
    C.bytes, C.reserved, C.orphaned, tonumber(first[2] or NO_BOUND)
  }
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
  redis.call('ZREM', set_of(g.state), gid)
  redis.call('ZREM', T .. ':deadline', gid)
  leave_holder(gid, g)
  add(g.state, -1)
  add(fate, 1)
  redis.call('HINCRBY', T .. ':reasons', fate .. '/' .. reason, 1)
  add('bytes', -g.bytes)
  if g.state == 'generating' then add('reserved', -g.reserve) end
  local prompt = g.ordinal
  local refills = g.refills + 1
  if requeue and refills <= C.max_attempts then
    prompt = ''
    local entry = cjson.encode({g.ordinal, g.n, g.pin, g.reserve, g.task, gid, refills})
    redis.call('ZADD', pending_key(g.pin), g.ordinal, entry)
    add('pending', 1)
    add('seeded_tasks', 1)
  end
  if fate == 'failed' then
    redis.call('LPUSH', T .. ':failures', cjson.encode({gid, g.task, reason, g.attempt, now_ms()}))
    redis.call('LTRIM', T .. ':failures', 0, 999)
  end
  redis.call('SADD', T .. ':trash', gid .. '|' .. prompt .. '|' .. g.payloads)
  redis.call('DEL', group_key(gid))
end

-- Back to ready, from generating (sealed), leased or consumed.
local function make_ready(gid, g)
  redis.call('ZREM', set_of(g.state), gid)
  leave_holder(gid, g)
  add(g.state, -1)
  add('ready', 1)
  if g.state == 'generating' then add('reserved', -g.reserve) end
  g.state, g.lease = 'ready', ''
  g.deadline = deadline_of(g)
  redis.call('ZADD', set_of('ready'), g.order, gid)
  redis.call('ZADD', T .. ':deadline', g.deadline, gid)
  save_group(gid, g)
end

-- Takes a generating group from its holder; it waits for the next one, or fails when it has lost too many.
local function orphan(gid, g, lost)
  if g.lost + lost >= C.max_attempts then
    finish(gid, g, 'failed', 'attempts_exhausted', false)
    return
  end
  leave_holder(gid, g)
  redis.call('ZADD', orphans_key(g.pin), g.seq, gid)
  add('orphaned', 1)
  g.lost, g.orphan = g.lost + lost, true
  save_group(gid, g)
end

local function generation_of(member)
  return tonumber(redis.call('HGET', RUN .. ':generations', member) or -1)
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
