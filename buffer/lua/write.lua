-- Stores outcomes of members; payloads were SET before. Fenced by (lease, attempt); at most one value per member.
-- ARGV: per lease, packed one behind the other: gid, lease, attempt, ranges of all tokens that follow, then per member:
-- member, values of its payload (0 not scored, 1 whole, more: that many pieces, -1 a draft of a member that is not
-- finished), payload bytes, response tokens (not scored: the reason), meta. Attempt and member are texts: they are
-- parts of names.
-- Answer: what became of each member, one character: 0 stored, and its group is sealed by it; 1 stored, 2 duplicate,
-- 3 superseded, 4 no such member; then the drafts to be removed, each as position among the members (from 0) and name
load_table(ARGV[1])
load_run()
local now = now_ms()
local groups, results, metas, useless = {}, {}, {}, {}
local MAX_CAUSES = 8
local SEALED, STORED, DUPLICATE, SUPERSEDED, NO_SUCH_MEMBER = '0', '1', '2', '3', '4'

local function fetch(gid)
  if groups[gid] == nil then groups[gid] = read_group(gid) or false end
  return groups[gid]
end

local function scored(g)
  if g.payloads == '' then return 0 end
  local _, commas = string.gsub(g.payloads, ',', '')
  return 1 + commas
end

local function seal(gid, g)
  g.sealed_ms = now
  if scored(g) < C.min_members then
    groups[gid], metas[gid] = false, nil
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
  g.tokens = g.tokens + tokens
  g.bytes = g.bytes + bytes
  add('bytes', bytes)
  local comma, pieces = g.payloads == '' and '' or ',', values == 1 and '' or ':' .. values
  g.payloads = g.payloads .. comma .. member .. ':' .. attempt .. pieces
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
  return DUPLICATE
end

local function superseded()
  add('superseded_writes', 1)
  return SUPERSEDED
end

-- Of the member that is next in the answer.
local function remove_draft(name)
  useless[#useless + 1], useless[#useless + 2] = #results, name
end

-- What was sampled so far of a member: it replaces shorter drafts, and those of earlier attempts.
local function draft(gid, lease, attempt, ranges, member, tokens)
  local own = member .. ':' .. attempt .. ':' .. tokens
  local g = fetch(gid)
  local known = g and g.drafts and read_draft(gid, member)
  local position, status = tonumber(member) + 1, STORED
  if not g or g.n == 0 then
    status = SUPERSEDED
  elseif position > g.n then
    status = NO_SUCH_MEMBER
  elseif not holds(g, lease, attempt) then
    status = SUPERSEDED
  elseif is_done(g, position) or (known and known.attempt == tonumber(attempt) and known.tokens >= tokens) then
    status = DUPLICATE
  end
  if status ~= STORED then
    -- A repetition is what the group has.
    if not (known and known.name == own) then remove_draft(own) end
    return status
  end
  redis.call('HSET', group_key(gid), 'd' .. member, attempt .. ' ' .. tokens .. ' ' .. ranges)
  if not known or tokens > known.tokens then progressed() end
  if known then remove_draft(known.name) else g.drafts = (g.drafts or 0) + 1 end
  return STORED
end

local function write(gid, lease, attempt, ranges, member, values, bytes, detail, meta)
  if values == -1 then return draft(gid, lease, attempt, ranges, member, detail) end
  local g = fetch(gid)
  if not g or g.n == 0 then return superseded() end
  local position = tonumber(member) + 1
  if position > g.n then return NO_SUCH_MEMBER end
  if not holds(g, lease, attempt) then
    -- A late repetition of what an earlier attempt has stored: that value is in use.
    return has_stored(g, member, attempt) and duplicate() or superseded()
  end
  if is_done(g, position) then return duplicate() end
  local known = g.drafts and read_draft(gid, member)
  if known then
    drop_draft(gid, g, member)
    remove_draft(known.name)
  end
  g.done = string.sub(g.done, 1, position - 1) .. '1' .. string.sub(g.done, position + 1)
  progressed()
  local fields = metas[gid] or {}
  metas[gid] = fields
  fields[#fields + 1], fields[#fields + 2] = member, meta
  if values == 0 then
    note_cause(g, detail)
  else
    score(gid, g, member, attempt, values, bytes, ranges, detail)
  end
  if string.find(g.done, '0', 1, true) then return STORED end
  seal(gid, g)
  return SEALED
end

for i = 2, #ARGV do
  local at, gid, lease, attempt, ranges = cmsgpack.unpack_limit(ARGV[i], 4, 0)
  while at >= 0 do
    local member, values, bytes, detail, meta
    at, member, values, bytes, detail, meta = cmsgpack.unpack_limit(ARGV[i], 5, at)
    results[#results + 1] = write(gid, lease, attempt, ranges, member, values, bytes, detail, meta)
  end
end
for gid, g in pairs(groups) do
  if g then
    local fields = metas[gid] or {}
    fields[#fields + 1], fields[#fields + 2] = 'group', packed_group(g)
    over('HSET', group_key(gid), fields)
  end
end
return {'ok', view(), table.concat(results), useless}
