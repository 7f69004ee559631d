-- Stores outcomes of members; payloads were SET before. Fenced by (lease, attempt); at most one value per member.
-- ARGV per write: gid, lease, attempt, member, scored (1/0), payload bytes, ranges, meta
-- Answer per write: status (1 stored, 2 duplicate, 3 superseded, 4 no such member), sealed (1/0), payloads of the
-- group if it is sealed by now (to be made persistent), else ''
load_table(ARGV[1])
load_run()
local now = now_ms()
local groups, results = {}, {}

local function fetch(gid)
  if groups[gid] == nil then
    local g = read_group(gid) or false
    if g then g.updates = {} end
    groups[gid] = g
  end
  return groups[gid]
end

local function save(gid, g)
  if #g.updates == 0 then return end
  local flat = g.updates
  for _, field in ipairs({'done', 'scored', 'bytes', 'ranges', 'payloads', 'sealed_ms', 'deadline'}) do
    flat[#flat + 1] = field
    flat[#flat + 1] = g[field]
  end
  redis.call('HSET', group_key(gid), unpack(flat))
  g.updates = {}
end

local function seal(gid, g)
  g.sealed_ms = now
  save(gid, g)
  if tonumber(g.scored) < C.min_members then
    finish(gid, g, 'failed', 'too_few_scored', false)
    groups[gid] = false
    return ''
  end
  if C.fifo == 1 then
    add('seals', 1)
    g.order = C.seals
  end
  make_ready(gid, g)
  return g.payloads
end

local function write(gid, lease, attempt, member, scored, bytes, ranges, meta)
  local g = fetch(gid)
  if not g then
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  local position = tonumber(member) + 1
  if position > tonumber(g.n) then return {4, 0, ''} end
  if g.attempt ~= attempt or (g.state == 'generating' and g.lease ~= lease) then
    add('superseded_writes', 1)
    return {3, 0, ''}
  end
  if string.sub(g.done, position, position) == '1' then
    add('duplicate_writes', 1)
    return {2, 0, g.state ~= 'generating' and g.payloads or ''}
  end
  g.done = string.sub(g.done, 1, position - 1) .. '1' .. string.sub(g.done, position + 1)
  g.updates[#g.updates + 1] = 'meta:' .. member
  g.updates[#g.updates + 1] = meta
  if scored == '1' then
    g.scored = tonumber(g.scored) + 1
    g.bytes = tonumber(g.bytes) + tonumber(bytes)
    add('bytes', tonumber(bytes))
    g.ranges = merge_ranges(g.ranges, ranges)
    g.payloads = (g.payloads == '' and '' or g.payloads .. ',') .. member .. ':' .. attempt
    local deadline = deadline_of(g)
    if deadline ~= tonumber(g.deadline) then
      g.deadline = deadline
      redis.call('ZADD', T .. ':deadline', deadline, gid)
    end
  end
  if string.find(g.done, '0', 1, true) == nil then return {1, 1, seal(gid, g)} end
  return {1, 0, ''}
end

for i = 2, #ARGV, 8 do
  results[#results + 1] = write(unpack(ARGV, i, i + 7))
end
for gid, g in pairs(groups) do
  if g then save(gid, g) end
end
return {'ok', view(), results}
