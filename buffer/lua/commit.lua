-- Turns consumed groups used below `version` into trained ones: the state that contains their use is durable, or
-- `buffer.commit` is `step`. Works in portions (the caller repeats while groups remain). The mark is set first, so that
-- a crash between two portions leaves groups that the next resume still counts as trained.
-- ARGV: incarnation, version, checkpoint, portion
load_table(ARGV[1])
load_run()
free_first()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
local version = tonumber(ARGV[3])
if counters.bounded == 1 then
  if version > run.committed then redis.call('HSET', RUN, 'committed', version) end
  if version >= run.committed and ARGV[4] ~= '' then redis.call('HSET', RUN, 'latest', ARGV[4]) end
end
local limit = '(' .. version
local gids = redis.call('ZRANGEBYSCORE', set_of('consumed'), '-inf', limit, 'LIMIT', 0, tonumber(ARGV[5]))
for _, gid in ipairs(gids) do finish(gid, read_group(gid), 'trained', 'committed', false) end
return {'ok', snapshot(), #gids, redis.call('ZCOUNT', set_of('consumed'), '-inf', limit)}
