-- Lists ready groups and the counts that the policy needs to choose a batch; changes nothing.
-- ARGV: for_version, count
-- Answer: ready candidates {gid, deadline} (the first in order, and the most urgent), live groups per deadline, leases
-- for for_version, leases for earlier versions. The live groups are unclaimed and unleased, counted from for_version on
-- (cumulative).
load_table(ARGV[1])
load_run()
local version, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local ids, orders, deadlines = {}, {}, {}

-- Adds groups of `from` that are ready and not among those already; `others` have their second score.
local function gather(from, others, first, second)
  local flat = redis.call('ZRANGE', from, 0, count - 1, 'WITHSCORES')
  if #flat == 0 then return end
  local names = {}
  for i = 1, #flat, 2 do names[#names + 1] = flat[i] end
  for _, other in ipairs(others) do
    local scores = redis.call('ZMSCORE', other, unpack(names))
    for i, name in ipairs(names) do
      if scores[i] and not first[name] then
        first[name], second[name] = tonumber(flat[2 * i]), tonumber(scores[i])
        ids[#ids + 1] = name
      end
    end
  end
end

local waiting = {table_key .. ':deadline'}
if counters.spent > 0 then waiting[2] = table_key .. ':reuse' end
gather(set_of('ready'), waiting, orders, deadlines)
if counters.ready > count and counters.bounded == 1 then
  -- The tables are passed the other way round: this set is scored by the deadline.
  gather(table_key .. ':deadline', {set_of('ready')}, deadlines, orders)
end
-- Floats travel as text; the orders by admission and by sealing are whole numbers.
local candidates, whole = {}, counters.order ~= FRESHEST and counters.order ~= PRIORITY
for i, gid in ipairs(ids) do
  candidates[i] = {gid, deadlines[gid], whole and orders[gid] or string.format('%.17g', orders[gid])}
end
local live = {}
-- Only admission order keeps slots free for stragglers, and has to know how urgent they are.
if counters.bounded == 1 and counters.order == IN_ORDER then
  for later = 0, counters.max_staleness do
    if later > 0 and later * counters.groups_per_step >= counters.generating + counters.ready then break end
    live[#live + 1] = redis.call('ZCOUNT', table_key .. ':deadline', '-inf', version + later)
  end
end
local taken = redis.call('ZCOUNT', set_of('leased'), version, version)
local earlier = redis.call('ZCOUNT', set_of('leased'), '-inf', '(' .. version)
return {'ok', snapshot(), candidates, live, taken, earlier}
