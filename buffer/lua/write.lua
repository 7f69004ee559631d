-- Stores outcomes of members; payloads were SET before. Fenced by (lease, attempt); at most one value per member.
-- ARGV per write: gid, lease, attempt, member, scored (1/0), payload bytes, ranges, meta
-- Answer per write: status (1 stored, 2 duplicate, 3 superseded, 4 no such member), sealed (1/0), payloads of the
-- group if it is sealed by now (to be made persistent), else ''
load_table(ARGV[1])
load_run()
local now = now_ms()
local groups, results = {}, {}

local function fetch(gid)
  if groups[gid] == nil then groups[gid] = read_group(gid) or false end
  return groups[gid]
end

local function seal(gid, g)
  g.sealed_ms = now
  groups[gid] = nil
  if g.scored < C.min_members then
    finish(gid, g, 'failed', 'too_few_scored', false)
    return ''
  end
  if C.fifo == 1 then
    add('seals', 1)
    g.order = C.seals
  end
  make_ready(gid, g)
  return g.payloads
end

local function score(gid, g, member, attempt, bytes, ranges)
  g.scored = g.scored + 1
  g.bytes = g.bytes + bytes
  add('bytes', bytes)
  g.payloads = (g.payloads == '' and '' or g.payloads .. ',') .. member .. ':' .. attempt
  if g.ranges == ranges then return end
  g.ranges = merge_ranges(g.ranges, ranges)
  local deadline = deadline_of(g)
  if deadline ~= g.deadline then
    g.deadline = deadline
    redis.call('ZADD', T .. ':deadline', deadline, gid)
  end
end

local function write(gid, lease, attempt, member, scored, bytes, ranges, meta)
  local g = fetch(gid)
  if not g then
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  local position = tonumber(member) + 1
  if position > g.n then return {4, 0, ''} end
  if g.attempt ~= tonumber(attempt) or (g.state == 'generating' and g.lease ~= lease) then
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  if string.sub(g.done, position, position) == '1' then
    add('duplicate_writes', 1)
    return {2, 0, g.state ~= 'generating' and g.payloads or ''}
  end
  g.done = string.sub(g.done, 1, position - 1) .. '1' .. string.sub(g.done, position + 1)
  redis.call('HSET', group_key(gid), member, meta)
  if scored == '1' then score(gid, g, member, attempt, tonumber(bytes), ranges) end
  if string.find(g.done, '0', 1, true) == nil then return {1, 1, seal(gid, g)} end
  return {1, 0, ''}
end

for i = 2, #ARGV, 8 do
  results[#results + 1] = write(unpack(ARGV, i, i + 7))
end
for gid, g in pairs(groups) do
  if g then save_group(gid, g) end
end
return {'ok', view(), results}
