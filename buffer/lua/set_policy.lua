-- The weights of a version can be fetched: the floor may rise. ARGV: '', incarnation, version
load_run()
free_first()
if tonumber(ARGV[2]) ~= R.incarnation then return {'fenced', R.incarnation} end
local version = tonumber(ARGV[3])
if version > R.version then
  R.version = version
  redis.call('HSET', RUN, 'version', version)
end
load_table('eval')
touch()
flush()
load_table('train')
touch()
if version > C.u then put('u', version) end
return {'ok', view(), R.version}
