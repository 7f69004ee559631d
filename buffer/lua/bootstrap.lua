-- A front begins: writes the rules of a table (they come from the configuration), unless another front that is alive
-- goes by different ones. ARGV: table, front, member ttl in ms, sole (1: no other can be alive), then field, value pairs
load_table(ARGV[1])
load_run()
if R.incarnation == 0 then redis.call('HSET', RUN, 'redis_run_id', redis_id()) end
local front, fronts, now = ARGV[2], RUN .. ':fronts', now_ms()
if ARGV[4] == '1' then redis.call('DEL', fronts) end
local others = {}
for _, other in ipairs(redis.call('SMEMBERS', fronts)) do
  local beat = tonumber(redis.call('ZSCORE', RUN .. ':heartbeats', other) or -1)
  if beat + tonumber(ARGV[3]) < now then
    redis.call('SREM', fronts, other)
  elseif other ~= front then
    others[#others + 1] = other
  end
end
local differing = {}
if #others > 0 then
  for i = 5, #ARGV, 2 do
    local present = redis.call('HGET', T, ARGV[i])
    if present and present ~= ARGV[i + 1] then differing[#differing + 1] = {ARGV[i], present, ARGV[i + 1]} end
  end
end
if #differing > 0 then return {'differs', others, differing} end
for i = 5, #ARGV, 2 do redis.call('HSET', T, ARGV[i], ARGV[i + 1]) end
-- A value over 64 bytes makes Redis keep the hash as a dictionary: as a list, reading all figures costs their square.
redis.call('HSET', T, 'about', 'figures and rules of a table; this text is here to be long, see buffer/lua/bootstrap.lua')
redis.call('SADD', fronts, front)
redis.call('ZADD', RUN .. ':heartbeats', now, front)
return {'ok', others}
