-- A standing stream broke: what its holder has ends after the reconnect grace, unless a newer stream is open.
-- ARGV: holder, token of the stream
load_table(ARGV[1])
load_run()
local holder = ARGV[2]
if redis.call('HGET', T .. ':streams', holder) ~= ARGV[3] then return {'ok', view()} end
redis.call('HDEL', T .. ':streams', holder)
local expires = tonumber(redis.call('ZSCORE', T .. ':holders', holder) or 0)
local short = now_ms() + C.grace_ms
if expires > short then redis.call('ZADD', T .. ':holders', short, holder) end
return {'ok', view()}
