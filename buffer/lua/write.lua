-- Stores outcomes of members; payloads were SET before. Fenced by (lease, attempt); at most one value per member.
-- ARGV per write: gid, lease, attempt, member, values of its payload (0 not scored, 1 whole, more: that many pieces,
-- -1 a draft of a member that is not finished), payload bytes, ranges, meta, response tokens (not scored: the reason)
-- Answer per write: status (1 stored, 2 duplicate, 3 superseded, 4 no such member), whether it has sealed its group
-- (1/0), name of the draft to be removed, else ''
load_table(ARGV[1])
load_run()
local now = now_ms()
local groups, results, metas = {}, {}, {}
local MAX_CAUSES = 8

local function fetch(gid)
  if groups[gid] == nil then groups[gid] = read_group(gid) or false end
  return groups[gid]
end

local function seal(gid, g)
  g.sealed_ms = now
  groups[gid] = nil
  if g.scored < C.min_members then
    metas[gid] = nil
    finish(gid, g, 'failed', 'too_few_scored', false)
    return
  end
  if C.order ~= IN_ORDER then
    add('seals', 1)
    g.seal, g.order = C.seals, C.seals
  end
  make_ready(gid, g)
end

-- What members say of a failure, once each.
local function note_cause(g, reason)
  g.causes = g.causes or {}
  for _, known in ipairs(g.causes) do
    if known == reason then return end
  end
  if #g.causes < MAX_CAUSES then g.causes[#g.causes + 1] = reason end
end

local function score(gid, g, member, attempt, values, bytes, ranges, tokens)
  g.scored = g.scored + 1
  g.tokens = (g.tokens or 0) + tokens
  g.bytes = g.bytes + bytes
  add('bytes', bytes)
  local place = member .. ':' .. attempt .. (values == '1' and '' or ':' .. values)
  g.payloads = (g.payloads == '' and '' or g.payloads .. ',') .. place
  if g.ranges == ranges then return end
  g.ranges = merge_ranges(g.ranges, ranges)
  -- What seals the group counts the deadline anew in any case.
  if not string.find(g.done, '0', 1, true) then return end
  local deadline = deadline_of(g)
  if deadline ~= g.deadline then
    g.deadline = deadline
    redis.call('ZADD', T .. ':deadline', deadline, gid)
  end
end

local function duplicate()
  add('duplicate_writes', 1)
  return {2, 0, ''}
end

-- What was sampled so far of a member: it replaces shorter drafts, and those of earlier attempts.
local function draft(gid, lease, attempt, member, ranges, tokens)
  local own = member .. ':' .. attempt .. ':' .. tokens
  local g = fetch(gid)
  if not g or g.n == 0 then return {3, 0, own} end
  local position = tonumber(member) + 1
  if position > g.n then return {4, 0, own} end
  local known = g.drafts and read_draft(gid, member)
  local useless = not (known and known.name == own) and own or ''
  if not holds(g, lease, attempt) then return {3, 0, useless} end
  if is_done(g, position) then return {2, 0, own} end
  if known and known.attempt == tonumber(attempt) and known.tokens >= tonumber(tokens) then
    return {2, 0, useless}
  end
  redis.call('HSET', group_key(gid), 'd' .. member, attempt .. ' ' .. tokens .. ' ' .. ranges)
  if not known then g.drafts = (g.drafts or 0) + 1 end
  return {1, 0, known and known.name or ''}
end

local function write(gid, lease, attempt, member, values, bytes, ranges, meta, detail)
  if values == '-1' then return draft(gid, lease, attempt, member, ranges, detail) end
  local g = fetch(gid)
  if not g or g.n == 0 then
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  local position = tonumber(member) + 1
  if position > g.n then return {4, 0, ''} end
  if not holds(g, lease, attempt) then
    -- A late repetition of what an earlier attempt has stored: that value is in use.
    if has_stored(g, member, attempt) then return duplicate() end
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  if is_done(g, position) then return duplicate() end
  local known = g.drafts and read_draft(gid, member)
  if known then drop_draft(gid, g, member) end
  g.done = string.sub(g.done, 1, position - 1) .. '1' .. string.sub(g.done, position + 1)
  metas[gid] = metas[gid] or {}
  table.insert(metas[gid], member)
  table.insert(metas[gid], meta)
  if values == '0' then
    note_cause(g, detail)
  else
    score(gid, g, member, attempt, values, tonumber(bytes), ranges, tonumber(detail))
  end
  local sealed = string.find(g.done, '0', 1, true) == nil
  if sealed then seal(gid, g) end
  return {1, sealed and 1 or 0, known and known.name or ''}
end

for i = 2, #ARGV, 9 do
  results[#results + 1] = write(unpack(ARGV, i, i + 8))
end
for gid, fields in pairs(metas) do over('HSET', group_key(gid), fields) end
for gid, g in pairs(groups) do
  if g then save_group(gid, g) end
end
return {'ok', view(), results}
