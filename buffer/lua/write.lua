-- Stores outcomes of members; payloads were SET before. Fenced by (lease, attempt); at most one value per member.
-- ARGV: a packed row per lease: gid, lease, attempt, ranges of all tokens that follow, then its members. A member is
-- its number, place, payload bytes, response tokens, meta. Attempt and number are texts: they are parts of names. A
-- member that is not scored has the place '', and its reason instead of response tokens. The place of a payload is the
-- digest of its bytes; one in pieces has ':' and their number as well. The place of a draft (of a member that is not
-- finished) is '-' and the digest.
-- Answer: a character per member, then the values to be removed, then the groups that failed at their seal. The
-- characters: 0 stored, and its group is sealed by it; 1 stored, 2 duplicate, 3 superseded, 4 no such member. A value is
-- a position among the members (from 0), and the name of a draft or '' for the member's payload. A failed group is the
-- position of the member that sealed it, the group's members, and ms since its admission.
--
-- Only values that no script can name any more are removed, judged here by the record. Bytes of a refused write may be
-- those that another one has stored, or is about to. The sweep finds the rest.
load_table(ARGV[1])
load_run()
local now = now_ms()
local groups, results, metas, useless, failed = {}, {}, {}, {}, {}
local MAX_CAUSES = 8
-- Characters of a digest.
local DIGEST = 16
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
  if scored(g) < counters.min_members then
    groups[gid], metas[gid] = false, nil
    -- The member that seals it is the next in the answer.
    failed[#failed + 1] = {#results, g.n, now - g.admitted_ms}
    finish(gid, g, 'failed', 'too_few_scored', false)
    return
  end
  if counters.order ~= IN_ORDER then
    add('seals', 1)
    g.seal, g.order = counters.seals, counters.seals
  end
  make_ready(gid, g)
end

-- Records the reasons that members give for a failure, once each.
local function record_cause(g, reason)
  g.causes = g.causes or {}
  for _, known in ipairs(g.causes) do
    if known == reason then return end
  end
  if #g.causes < MAX_CAUSES then g.causes[#g.causes + 1] = reason end
end

local function score(gid, g, member, attempt, place, bytes, ranges, tokens)
  g.tokens = g.tokens + tokens
  g.bytes = g.bytes + bytes
  add('bytes', bytes)
  local comma = g.payloads == '' and '' or ','
  g.payloads = g.payloads .. comma .. member .. ':' .. attempt .. ':' .. place
  if g.ranges == ranges then return end
  g.ranges = merge_ranges(g.ranges, ranges)
  -- The write that seals the group computes the deadline again in any case.
  if not string.find(g.done, '0', 1, true) then return end
  local deadline = deadline_of(g)
  if deadline ~= g.deadline then
    g.deadline = deadline
    redis.call('ZADD', table_key .. ':deadline', deadline, gid)
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

-- Removes a value of the member that is next in the answer.
local function remove(name)
  useless[#useless + 1], useless[#useless + 2] = #results, name
end

-- Stores the tokens sampled so far of a member: they replace shorter drafts, and those of earlier attempts.
local function draft(gid, lease, attempt, ranges, member, digest, tokens)
  local own = member .. ':' .. attempt .. ':' .. tokens .. ':' .. digest
  local g = fetch(gid)
  local known = g and g.drafts and read_draft(gid, member)
  local position, status = tonumber(member) + 1, STORED
  if not g or g.n == 0 then
    status = SUPERSEDED
  elseif position > g.n then
    status = NO_SUCH_MEMBER
  elseif not may_write(g, lease, attempt) then
    status = SUPERSEDED
  elseif is_done(g, position) or (known and known.attempt == tonumber(attempt) and known.tokens >= tokens) then
    status = DUPLICATE
  end
  if status ~= STORED then
    -- A repetition is what the group has; a shorter draft is never what it needs.
    local useless_now = status == DUPLICATE or is_over(gid, g, position, attempt)
    if useless_now and not (known and known.name == own) then remove(own) end
    return status
  end
  redis.call('HSET', group_key(gid), 'd' .. member, attempt .. ' ' .. tokens .. ' ' .. digest .. ' ' .. ranges)
  if not known or tokens > known.tokens then record_progress() end
  if known then remove(known.name) else g.drafts = (g.drafts or 0) + 1 end
  return STORED
end

-- The status of a member that is not stored, or nil.
local function refused(g, position, lease, attempt, member)
  if not g or g.n == 0 then return superseded() end
  if position > g.n then return NO_SUCH_MEMBER end
  -- A late repetition of what an earlier attempt has stored.
  if not may_write(g, lease, attempt) then return has_stored(g, member, attempt) and duplicate() or superseded() end
  if is_done(g, position) then return duplicate() end
end

local function write(gid, lease, attempt, ranges, member, place, bytes, detail, meta)
  if string.sub(place, 1, 1) == '-' then
    return draft(gid, lease, attempt, ranges, member, string.sub(place, 2), detail)
  end
  local g = fetch(gid)
  local position = tonumber(member) + 1
  local status = refused(g, position, lease, attempt, member)
  if status then
    local in_use = g and has_stored(g, member, attempt, string.sub(place, 1, DIGEST))
    if place ~= '' and not in_use and is_over(gid, g, position, attempt) then remove('') end
    return status
  end
  local known = g.drafts and read_draft(gid, member)
  if known then
    drop_draft(gid, g, member)
    remove(known.name)
  end
  g.done = string.sub(g.done, 1, position - 1) .. '1' .. string.sub(g.done, position + 1)
  record_progress()
  local fields = metas[gid] or {}
  metas[gid] = fields
  fields[#fields + 1], fields[#fields + 2] = member, meta
  if place == '' then
    record_cause(g, detail)
  else
    score(gid, g, member, attempt, place, bytes, ranges, detail)
  end
  if string.find(g.done, '0', 1, true) then return STORED end
  seal(gid, g)
  return SEALED
end

for i = 2, #ARGV do
  local at, gid, lease, attempt, ranges = cmsgpack.unpack_limit(ARGV[i], 4, 0)
  while at >= 0 do
    local member, place, bytes, detail, meta
    at, member, place, bytes, detail, meta = cmsgpack.unpack_limit(ARGV[i], 5, at)
    results[#results + 1] = write(gid, lease, attempt, ranges, member, place, bytes, detail, meta)
  end
end
for gid, g in pairs(groups) do
  if g then
    local fields = metas[gid] or {}
    fields[#fields + 1], fields[#fields + 2] = 'group', packed_group(g)
    in_bulk('HSET', group_key(gid), fields)
  end
end
return {'ok', snapshot(), table.concat(results), useless, failed}
