-- A standing stream broke: what its holder has ends after the reconnect grace, unless a newer stream is open.
-- ARGV: holder, token of the stream
load_table(ARGV[1])
load_run()
local holder = ARGV[2]
if redis.call('HGET', table_key .. ':streams', holder) ~= ARGV[3] then return {'ok', snapshot()} end
redis.call('HDEL', table_key .. ':streams', holder)
local expires = tonumber(redis.call('ZSCORE', table_key .. ':holders', holder) or 0)
local short = now_ms() + counters.grace_ms
if expires > short then redis.call('ZADD', table_key .. ':holders', short, holder) end
return {'ok', snapshot()}
