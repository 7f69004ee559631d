-- Adds prompt tasks: ARGV incarnation, end_of_data, withdraw, then per task: ordinal, entry (packed: ordinal, n members,
-- pin, reserve, task, parent, refills), pin.
load_table(ARGV[1])
load_run()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, view()} end
local withdrawn, added = 0, 0
-- A repetition brings nothing new: it takes back nothing, above all not what it has added the first time.
local repeated = #ARGV > 4 and tonumber(ARGV[#ARGV - 2]) <= C.seeded
if ARGV[4] == '1' and not repeated then withdrawn = withdraw_all() end
local used = redis.call('EXISTS', T .. ':used') == 1
for i = 5, #ARGV, 3 do
  local ordinal = tonumber(ARGV[i])
  if ordinal > C.seeded then
    put('seeded', ordinal)
    local group = used and redis.call('HGET', T .. ':used', ordinal)
    if group then
      -- It was used already, in time that Redis has lost; the prompt ends with that group.
      redis.call('HDEL', T .. ':used', ordinal)
      if redis.call('EXISTS', group_key(group)) == 0 then redis.call('SADD', T .. ':trash', '|' .. ordinal .. '||') end
    else
      local pin = ARGV[i + 2]
      redis.call('ZADD', pending_key(pin), ordinal, ARGV[i + 1])
      if pin ~= '' then redis.call('SADD', T .. ':pins', pin) end
      add('pending', 1)
      add('seeded_tasks', 1)
      added = added + 1
    end
  end
end
if ARGV[3] == '1' then
  put('end_of_data', 1)
elseif added > 0 then
  put('end_of_data', 0)
end
return {'ok', view(), added, C.seeded, C.pending, withdrawn}
