-- Adds prompt tasks: ARGV incarnation, end_of_data, withdraw, then per task: ordinal, entry (JSON), pin.
load_table(ARGV[1])
load_run()
if tonumber(ARGV[2]) ~= R.incarnation then return {'fenced', view()} end
local withdrawn, added = 0, 0
if ARGV[4] == '1' then withdrawn = withdraw_all() end
for i = 5, #ARGV, 3 do
  local ordinal = tonumber(ARGV[i])
  if ordinal > C.seeded then
    local pin = ARGV[i + 2]
    redis.call('ZADD', pending_key(pin), ordinal, ARGV[i + 1])
    if pin ~= '' then redis.call('SADD', T .. ':pins', pin) end
    put('seeded', ordinal)
    add('pending', 1)
    add('seeded_tasks', 1)
    added = added + 1
  end
end
if ARGV[3] == '1' then
  put('end_of_data', 1)
elseif added > 0 then
  put('end_of_data', 0)
end
return {'ok', view(), added, C.seeded, C.pending, withdrawn}
