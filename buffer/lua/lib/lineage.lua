-- The age of a group's tokens, and the version by which it must train: as buffer.policy.version_ranges has it.

-- The version from which an incarnation continued; nil where that is not known.
local function resumed_at(incarnation)
  return tonumber(redis.call('HGET', RUN .. ':takeovers', incarnation) or nil)
end

-- By incarnation, as far as asked for: the least version from which a later one continued. A takeover clears it.
local ancestors = {}

local function ancestor_of(incarnation)
  local least = ancestors[incarnation]
  if not least then
    least = NO_BOUND
    for later = incarnation + 1, run.incarnation do least = math.min(least, resumed_at(later) or 0) end
    ancestors[incarnation] = least
  end
  return least
end

-- Version on the present lineage to which tokens of (incarnation, version) are equivalent. A version that a later
-- learner discarded counts its way back to the common ancestor and forth again.
local function effective(incarnation, version)
  local ancestor = ancestor_of(incarnation)
  if version > ancestor then return 2 * ancestor - version end
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
  if counters.bounded == 0 then return NO_BOUND end
  -- Nearly always: all tokens of the present incarnation, in one range, and the grant no older.
  local inc, low = string.match(g.ranges, '^(%d+):(%d+):%d+$')
  if inc and tonumber(inc) == run.incarnation and g.state ~= 'generating' then
    return tonumber(low) + counters.max_staleness
  end
  local oldest = nil
  local function include(incarnation, version)
    local e = effective(tonumber(incarnation), tonumber(version))
    if oldest == nil or e < oldest then oldest = e end
  end
  for inc, low, high in string.gmatch(g.ranges, '(%d+):(%d+):(%d+)') do
    include(inc, low)
    include(inc, high)
  end
  if g.state == 'generating' or oldest == nil then
    local inc, version = string.match(g.grant, '(%d+):(%d+)')
    include(inc, version)
  end
  return oldest + counters.max_staleness
end
