-- The weights of a version can be fetched: the floor may rise. ARGV: '', incarnation, version
load_run()
free_first()
local no = refusal(tonumber(ARGV[2]))
if no then return {no} end
local version = tonumber(ARGV[3])
if version > run.version then
  run.version = version
  redis.call('HSET', RUN, 'version', version)
end
load_table('eval')
touch()
flush()
load_table('train')
touch()
if version > counters.u then put('u', version) end
return {'ok', snapshot(), run.version}
