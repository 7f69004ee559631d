-- Adds prompt tasks.
-- ARGV: incarnation, end_of_data, withdraw, number of the call (grows with every call of a learner), then per task:
-- ordinal, entry, pin, digest. An entry is packed: ordinal, n members, pin, reserve, task, parent, refills.
load_table(ARGV[1])
load_run()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
local withdrawn, added = 0, 0
local incarnation, call = tonumber(ARGV[2]), tonumber(ARGV[5])
-- A repetition, or a copy that comes after a later call, takes back nothing and does not end the data.
local news = incarnation > counters.seed_by or call > counters.seed_call
if news then
  put('seed_by', incarnation)
  put('seed_call', call)
  -- Nor does a call that brings nothing new withdraw tasks that another call has added.
  local known = #ARGV > 5 and tonumber(ARGV[#ARGV - 3]) <= counters.seeded
  if ARGV[4] == '1' and not known then withdrawn = withdraw_all() end
end
local used = redis.call('EXISTS', table_key .. ':used') == 1
local digests = {}
for i = 6, #ARGV, 4 do
  local ordinal = tonumber(ARGV[i])
  if ordinal > counters.seeded then
    put('seeded', ordinal)
    if used and redis.call('HDEL', table_key .. ':used', ordinal) == 1 then
      -- It was used already, in time that Redis has lost: its group can be given to no one again.
      trash[#trash + 1] = '|' .. ordinal .. ':' .. ARGV[i + 3] .. '||'
    else
      local pin = ARGV[i + 2]
      enter(pending_key(pin), ARGV[i + 1], ordinal)
      if pin ~= '' then redis.call('SADD', table_key .. ':pins', pin) end
      digests[#digests + 1], digests[#digests + 2] = digest_key(ordinal), ARGV[i + 3]
      added = added + 1
    end
  end
end
for i = 1, #digests, 1000 do redis.call('MSET', unpack(digests, i, math.min(i + 999, #digests))) end
add('pending', added)
add('seeded_tasks', added)
if news and (ARGV[3] == '1' or added > 0) then put('end_of_data', tonumber(ARGV[3])) end
return {'ok', snapshot(), added, counters.seeded, counters.pending, withdrawn}
