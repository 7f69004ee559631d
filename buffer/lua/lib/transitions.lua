-- The transitions of a group between its states, and into its fate, with all that moves along: uses, draws, drafts,
-- cancellations, notes of failures.

-- Orders of sampling, as buffer.policy.rules numbers them.
local IN_ORDER, FRESHEST, PRIORITY = 0, 2, 3
local WEIGHT_UNIT = 1000000

-- Uses: the train versions of the group's claims on the surviving lineage, ascending; absent while it has none.
local function use_count(g) return g.uses and #g.uses or 0 end
local function last_use(g) return g.uses[#g.uses] end
local function waiting_set(g) return set_of(g.uses and 'reuse' or 'deadline') end
-- Uses that an unclaimed group does not demand of the gate any more.
local function spent(g) return math.min(use_count(g), counters.samples_per_insert) end

-- Changes the uses of a group; `claimed`: before and after, whether it counts as consumed.
local function set_uses(g, uses, was_consumed, is_consumed)
  local before = was_consumed and 0 or spent(g)
  add('uses', #uses - use_count(g))
  g.uses = #uses > 0 and uses or nil
  add('spent', (is_consumed and 0 or spent(g)) - before)
end

-- Weighted draws: `g.draw` has weight, priority, draws and chance of a group; any of them may be absent.
local function weight_of(g) return g.draw and g.draw.weight or WEIGHT_UNIT end

-- Enters a ready group into the race by which weighted draws are made (buffer.policy.draw_weights).
local function enter_race(gid, g)
  g.draw = g.draw or {}
  g.draw.draws = (g.draw.draws or 0) + 1
  local digest = redis.sha1hex(gid .. ':' .. g.draw.draws .. ':' .. counters.seed)
  local uniform = (tonumber(string.sub(digest, 1, 13), 16) + 0.5) / 16 ^ 13
  g.order = counters.race - math.log(uniform) / weight_of(g) * WEIGHT_UNIT
end

-- The place of a group that becomes ready among the others.
local function set_order(gid, g)
  if counters.order == FRESHEST then
    g.order = (g.seal or 0) / 2 ^ 32 - g.deadline
  elseif counters.order == PRIORITY then
    add('weight', weight_of(g))
    enter_race(gid, g)
  end
end

-- A ready group leaves the table of candidates.
local function leave_ready(g)
  if counters.order == PRIORITY then add('weight', -weight_of(g)) end
end

-- Leases that a member works on and that are not needed any more, as "gid lease", until it has been notified.
local function cancels_key(member) return table_key .. ':cancels:' .. member end

-- Notifies the generator of a group that it is not needed: its holder, or the last one, which may still work on it.
local function cancel(gid, g)
  local worker = g.holder ~= '' and g.holder or g.previous_holder or ''
  if worker == '' or generation_of(worker) < 0 then return end
  redis.call('SADD', cancels_key(worker), gid .. ' ' .. g.lease)
  add('cancelled', 1)
  -- Fronts read from it who is to be notified since they last looked.
  redis.call('ZADD', table_key .. ':cancelled_at', counters.cancelled, worker)
end

-- Drafts of members that are not done, in the fields d0, d1, ... of the group's hash. Each is "attempt tokens digest
-- ranges"; `g.drafts` counts them, and is absent for 0. The name of a draft is "member:attempt:tokens:digest".
local function read_draft(gid, member)
  local text = redis.call('HGET', group_key(gid), 'd' .. member)
  if not text then return nil end
  local attempt, tokens, digest, ranges = string.match(text, '(%d+) (%d+) (%x+) (.*)')
  local name = member .. ':' .. attempt .. ':' .. tokens .. ':' .. digest
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
  local tokens, class = g.tokens, 1
  for _, draft in ipairs(drafts) do tokens = tokens + draft.tokens end
  while class < tokens do class = 2 * class end
  redis.call('HINCRBY', table_key .. ':evicted_tokens', class, 1)
end

-- Notes a failed group with its cause; the oldest note makes room. A note keeps its prompt until it is driven again,
-- except where the learner itself took the task back. Returns whether it does.
local function record_failure(gid, g, reason)
  local kept = reason ~= 'withdrawn' and g.n > 0
  redis.call('HSET', table_key .. ':dead', gid, cjson.encode({
    group = gid, task = g.task, reason = reason, attempts = attempts_of(g), failed_ms = now_ms(), causes = g.causes,
    ordinal = g.ordinal, n = g.n, pin = g.pin, reserve = g.reserve, kept = kept, redriven = false
  }))
  redis.call('LPUSH', table_key .. ':failures', gid)
  while redis.call('LLEN', table_key .. ':failures') > counters.failed_kept do
    local oldest = redis.call('RPOP', table_key .. ':failures')
    local note = cjson.decode(redis.call('HGET', table_key .. ':dead', oldest))
    redis.call('HDEL', table_key .. ':dead', oldest)
    if note.kept then redis.call('SADD', table_key .. ':trash', '|' .. drop_prompt(note.ordinal) .. '||') end
  end
  return kept
end

-- Queues the prompt of a failed group again, as a task with that group as its parent. The note then no longer keeps it.
local function redrive(gid, note)
  local entry = cmsgpack.pack({note.ordinal, note.n, note.pin, note.reserve, note.task, gid, 0})
  redis.call('ZADD', pending_key(note.pin), note.ordinal, entry)
  if note.pin ~= '' then redis.call('SADD', table_key .. ':pins', note.pin) end
  note.kept, note.redriven = false, true
  redis.call('HSET', table_key .. ':dead', gid, cjson.encode(note))
  add('pending', 1)
  add('seeded_tasks', 1)
  add('redriven', 1)
end

local function leave_holder(gid, g)
  if g.holder ~= '' then leave(held_by(g.holder), gid) end
  if is_orphan(g) then
    redis.call('ZREM', orphans_key(g.pin), gid)
    add('orphaned', -1)
  end
  g.holder = ''
end

-- Ends a group with its fate and notes its payloads for removal. `requeue` gives its prompt another group.
local function finish(gid, g, fate, reason, requeue)
  if g.state == 'generating' and string.find(g.done, '0', 1, true) then cancel(gid, g) end
  leave(set_of(g.state), gid)
  if g.state ~= 'consumed' then leave(set_of('deadline'), gid) end
  leave_holder(gid, g)
  add(g.state, -1)
  add(fate, 1)
  record_progress()
  ended[fate .. '/' .. reason] = (ended[fate .. '/' .. reason] or 0) + 1
  add('bytes', -g.bytes)
  if g.state == 'consumed' then add('consumed_bytes', -g.bytes) end
  if g.state == 'generating' then add('reserved', -g.reserve) end
  if g.state == 'ready' then leave_ready(g) end
  if g.uses and g.state ~= 'consumed' then
    leave(set_of('reuse'), gid)
    add('spent', -spent(g))
  end
  local refills = g.refills + 1
  local again = requeue and refills <= counters.max_attempts
  if again then
    local entry = cmsgpack.pack({g.ordinal, g.n, g.pin, g.reserve, g.task, gid, refills})
    redis.call('ZADD', pending_key(g.pin), g.ordinal, entry)
    add('pending', 1)
    add('seeded_tasks', 1)
  end
  local drafts, names = drafts_of(gid, g), {}
  for i, draft in ipairs(drafts) do names[i] = draft.name end
  if fate == 'evicted_stale' then count_length(g, drafts) end
  local kept = fate == 'failed' and record_failure(gid, g, reason)
  local prompt = (again or kept) and '' or drop_prompt(g.ordinal)
  trash[#trash + 1] = gid .. '|' .. prompt .. '|' .. g.payloads .. '|' .. table.concat(names, ',')
  redis.call('DEL', group_key(gid))
end

-- A group that may not be used any more but has been: consumed until its last use is committed, then trained.
local function retire(gid, g)
  if last_use(g) < run.committed then return finish(gid, g, 'trained', 'committed', false) end
  leave(set_of(g.state), gid)
  leave(set_of('reuse'), gid)
  leave_holder(gid, g)
  if g.state == 'ready' then leave_ready(g) end
  add('spent', -spent(g))
  add(g.state, -1)
  add('consumed', 1)
  add('consumed_bytes', g.bytes)
  g.state, g.lease = 'consumed', ''
  enter(set_of('consumed'), gid, last_use(g))
  save_group(gid, g)
end

-- Ends a group that will not be trained (again).
local function end_group(gid, g, fate, reason)
  if g.uses and g.state ~= 'consumed' then return retire(gid, g) end
  finish(gid, g, fate, reason, false)
end

-- Back to ready, from generating (sealed), leased or consumed. The caller saves the group.
local function make_ready(gid, g)
  leave(set_of(g.state), gid)
  leave_holder(gid, g)
  add(g.state, -1)
  add('ready', 1)
  if g.state == 'consumed' then add('consumed_bytes', -g.bytes) end
  if g.state == 'generating' then add('reserved', -g.reserve) end
  g.state, g.lease = 'ready', ''
  g.deadline = deadline_of(g)
  set_order(gid, g)
  enter(set_of('ready'), gid, g.order)
  enter(waiting_set(g), gid, g.deadline)
end

-- Takes a generating group from its holder; it waits for the next one, or fails when it has lost too many.
local function release_lease(gid, g, lost)
  if g.lost + lost >= counters.max_attempts then
    finish(gid, g, 'failed', 'attempts_exhausted', false)
    return
  end
  -- A generator that gives a group up needs no notice; one that has lost it may come back.
  if g.holder ~= '' then g.previous_holder = lost > 0 and g.holder or nil end
  leave_holder(gid, g)
  redis.call('ZADD', orphans_key(g.pin), number_of(gid), gid)
  add('orphaned', 1)
  g.lost = g.lost + lost
  save_group(gid, g)
end

-- Ends a lease that its holder has lost or forgotten: what was leased is ready again, what is generating waits for the
-- next holder. Returns whether it was leased.
local function end_lease(gid, g, lost)
  if g.state ~= 'leased' then
    release_lease(gid, g, lost)
    return false
  end
  make_ready(gid, g)
  save_group(gid, g)
  return true
end
