-- Shared by all scripts: the values of run and table, the names of keys, the fences.
--
-- KEYS[1]  the run's hash; every other key of metadata begins with it and so lies in the same cluster slot
-- ARGV[1]  the table (`train`, `eval`), or '' where a script concerns the run alone
--
-- Invariants (of all scripts)
--   * A group is in exactly one of the sets generating, ready, leased, consumed; the counter of the same name
--     moves in the same script. A fate removes the group and counts it, once.
--   * `deadline` holds the groups that are generating or ready and wait for their first use. They are scored by the
--     last version that may train them. Ready groups that have been used before are in `reuse` instead, scored alike.
--   * Keys of payloads and prompts live in other slots: scripts only note them in `trash`, a front removes them.
--   * `rev` grows with every change, so that a front knows the newer of two answers.
local RUN = KEYS[1]
local NO_BOUND = 10000000000000
-- Numbers jump ahead by this much after a loss, so that no number of the lost time comes again.
local ID_GAP_AFTER_LOSS = 1048576
-- Milliseconds between two hints. Changes in between send none: fronts read the table once more after the last hint.
local HINT_MS = 20
local COUNTERS = [[
  rev seq leases seals u admitted trained evicted_stale filtered failed generating ready leased consumed seeded
  seeded_tasks pending withdrawn first_admissions readmissions superseded_writes duplicate_writes end_of_data bytes
  reserved orphaned uses spent race weight cancelled redriven skipped consumed_bytes losses seed_by seed_call
]]
local RULES = [[
  groups_per_step max_staleness bounded order max_reuse samples_per_insert seed min_members lease_ms grace_ms max_bytes
  max_attempts failed_kept
]]
-- `counters`: the table's values, and after them its rules. `flush` writes `ended` (fates by reason) and `trash`. It
-- writes the time as well, where a group has come nearer to its end (`moved`). The last hint was sent at `hinted_ms`.
local TABLE, table_key, counters, changed, ended, trash, run, moved, hinted_ms
local entering, leaving, sets = {}, {}, {}

-- Packed into one field each: reading and writing them one by one would cost more than most scripts do otherwise. If
-- Redis has lost them, all are 0.
local function unpacked(packed, names)
  if packed then return cmsgpack.unpack(packed) end
  local zeros = {}
  for name in string.gmatch(names, '%S+') do zeros[name] = 0 end
  return zeros
end

local function load_table(name)
  TABLE, table_key, changed, ended, trash, sets, moved = name, RUN .. ':' .. name, false, {}, {}, {}, false
  local packed = redis.call('HMGET', table_key, 'counters', 'rules', 'hinted_ms')
  counters = setmetatable(unpacked(packed[1], COUNTERS), {__index = unpacked(packed[2], RULES)})
  hinted_ms = tonumber(packed[3] or 0)
end

-- The state of a run that scripts read. Takeovers, which grow with the age of a run, are in keys of their own.
local STATE = {
  'incarnation', 'version', 'learner_until', 'committed', 'finished', 'fronts', 'learner', 'suspect', 'redis_run_id',
  'lease_secret'
}
local NUMBERS = 6

local function load_run()
  run = {}
  for i, value in ipairs(redis.call('HMGET', RUN, unpack(STATE))) do
    run[STATE[i]] = value or (i <= NUMBERS and 0) or nil
    if i <= NUMBERS then run[STATE[i]] = tonumber(run[STATE[i]]) end
  end
  run.learner = run.learner or ''
end

local function add(field, by)
  if by == 0 then return end
  counters[field] = counters[field] + by
  changed = true
end

-- The name of a lease is the right to write and to release under it: no other member can guess it.
local function new_lease(kind)
  add('leases', 1)
  local secret = (run.lease_secret or '') .. TABLE
  return kind .. counters.leases .. '-' .. string.sub(redis.sha1hex(secret .. counters.leases), 1, 16)
end

local function put(field, value)
  if counters[field] ~= value then
    counters[field] = value
    changed = true
  end
end

-- Wakes the waiters although no counter of this table changed.
local function touch() changed = true end

-- A group has come nearer to its end: the clock of a stall begins again. Only steps that cannot be undone and done
-- again for ever count: leases, releases and re-admissions do not. Sampled tokens count in addition, in the learner
-- (`learner/liveness/stall_detector.py`).
local function record_progress() moved = true end

-- Runs a command over many members of one key (or score, member pairs): far cheaper than a command for each.
local function in_bulk(command, key, members)
  for i = 1, #members, 1000 do redis.call(command, key, unpack(members, i, math.min(i + 999, #members))) end
end

-- Groups enter and leave the sorted sets of the table together: `apply_moves` carries it out, before the script
-- answers. A script that reads a set into or out of which it has moved groups calls it first.
local function apply_moves()
  for key, gids in pairs(leaving) do in_bulk('ZREM', key, gids) end
  for key, scored in pairs(entering) do in_bulk('ZADD', key, scored) end
  entering, leaving = {}, {}
end

local function enter(key, gid, score)
  if leaving[key] then apply_moves() end
  local scored = entering[key]
  if not scored then
    scored = {}
    entering[key] = scored
  end
  local length = #scored
  scored[length + 1], scored[length + 2] = score, gid
end

local function leave(key, gid)
  if entering[key] then apply_moves() end
  local gids = leaving[key]
  if not gids then
    gids = {}
    leaving[key] = gids
  end
  gids[#gids + 1] = gid
end

-- Tells the other fronts of a change, unless they heard of one a moment ago. A front that is alone has the news in the
-- answer, or, where that is lost, in the next one.
local function send_hint()
  if run.fronts <= 1 then return end
  local now = now_ms()
  -- A time in the future is from before the clock was set back.
  if hinted_ms <= now and now < hinted_ms + HINT_MS then return end
  hinted_ms = now
  redis.call('HSET', table_key, 'hinted_ms', now)
  redis.call('PUBLISH', RUN .. ':wake', TABLE .. ' ' .. counters.rev)
end

-- Writes the counters if they have changed, and sends a hint.
local function flush()
  apply_moves()
  local at = moved and {'moved_ms', now_ms()} or {}
  moved = false
  if not changed then
    -- No other front need hear of it.
    if at[1] then redis.call('HSET', table_key, unpack(at)) end
    return
  end
  counters.rev = counters.rev + 1
  for reason, count in pairs(ended) do redis.call('HINCRBY', table_key .. ':reasons', reason, count) end
  in_bulk('SADD', table_key .. ':trash', trash)
  redis.call('HSET', table_key, 'counters', cmsgpack.pack(counters), unpack(at))
  send_hint()
  changed, ended, trash = false, {}, {}
end

-- Uses that the unclaimed groups demand: what the gate counts. Their number, where each is used once.
local function demand()
  return counters.samples_per_insert * (counters.generating + counters.ready + counters.leased) - counters.spent
end

local function first_of(set)
  return tonumber(redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2] or NO_BOUND)
end

-- The snapshot that every answer carries; writes what has changed first.
local function snapshot()
  flush()
  local first = first_of(table_key .. ':deadline')
  if counters.spent > 0 then first = math.min(first, first_of(table_key .. ':reuse')) end
  return {
    counters.rev, run.incarnation, run.version, counters.u, counters.generating, counters.ready, counters.leased,
    counters.consumed, counters.pending, counters.end_of_data,
    counters.bytes, counters.reserved, counters.orphaned, counters.cancelled, first, demand(),
    run.suspect and 1 or 0
  }
end

local function redis_id() return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') end

-- True if Redis may have lost acknowledged writes. It is another process than the run knows (restarted, its data
-- replaced or gone), or a front saw a revision go back. Then nothing is given out until the learner has reported what
-- it has used (`reassert`). Neither ids nor leases of the lost time may come a second time. The mark is the number of
-- the doubt.
local function suspect() return run.suspect ~= nil or run.redis_run_id ~= redis_id() end

-- Numbers follow the clock: they differ even where the same state is lost twice.
local function mark_suspect()
  run.suspect = string.format('%d', math.max(now_ms(), tonumber(run.suspect or 0) + 1))
  redis.call('HSET', RUN, 'suspect', run.suspect)
end

-- The reason why a learner's command is refused, or nil. Redis has lost the takeover of an incarnation that it does not
-- know, unless there was none. The learner with that incarnation is in the same doubt.
local function refusal(incarnation)
  if incarnation < run.incarnation then return 'fenced' end
  if suspect() then return 'suspect' end
  if incarnation > run.incarnation then return 'unknown_incarnation' end
end

-- A sorted set of the table: of a state, `deadline` or `reuse`.
local function set_of(name)
  local key = sets[name]
  if not key then
    key = table_key .. ':' .. name
    sets[name] = key
  end
  return key
end
-- The groups of a holder, sorted by admission; of the learner, those that are leased.
local function held_by(holder) return holder == 'learner' and set_of('leased') or table_key .. ':held:' .. holder end
local function group_key(gid) return table_key .. ':g:' .. gid end
local function pending_key(pin) return table_key .. ':pending:' .. pin end
local function orphans_key(pin) return table_key .. ':orphans:' .. pin end

local function generation_of(member)
  return tonumber(redis.call('HGET', RUN .. ':generations', member) or -1)
end

-- The reason why the holder of an older connection (generators: by generation) or incarnation (the learner) is refused,
-- or nil.
local function outdated(holder, fence)
  if holder == 'learner' then return refusal(fence) end
  if generation_of(holder) ~= fence then return 'old_generation' end
end

-- Fronts that may be alive are listed; the run knows their number.
local function list_fronts(command, front)
  if redis.call(command, RUN .. ':fronts', front) == 1 then
    run.fronts = redis.call('SCARD', RUN .. ':fronts')
    redis.call('HSET', RUN, 'fronts', run.fronts)
  end
end

-- Roles of members, numbered as in membership.proto.
local ROLES = 5

-- A member is gone: its pending notices go with it, and the stream that a dead front has left open.
local function forget(member)
  list_fronts('SREM', member)
  for role = 1, ROLES do redis.call('SREM', RUN .. ':role:' .. role, member) end
  redis.call('ZREM', RUN .. ':heartbeats', member)
  for _, part in ipairs({':members', ':status', ':generations', ':joins'}) do redis.call('HDEL', RUN .. part, member) end
  for _, name in ipairs({'train', 'eval'}) do
    redis.call('DEL', RUN .. ':' .. name .. ':cancels:' .. member)
    redis.call('ZREM', RUN .. ':' .. name .. ':cancelled_at', member)
    redis.call('HDEL', RUN .. ':' .. name .. ':streams', member)
  end
end

-- True if a stream has been replaced by a newer one of the same holder, maybe at another front. Then it may take
-- nothing more in its holder's name, since the holder would not hear of it. No token, no stream: the caller is trusted.
local function replaced(holder, token)
  return token ~= '' and redis.call('HGET', table_key .. ':streams', holder) ~= token
end

-- Over its memory limit Redis refuses a script if its first write needs memory, and lets it continue if that write
-- frees some. Verbs that lead out of that state, or keep what there is, begin with such a write.
local function free_first() redis.call('DEL', RUN .. ':none') end

-- Gives everything a holder has its full term.
local function renew(holder, now)
  redis.call('ZADD', table_key .. ':holders', now + counters.lease_ms, holder)
end
