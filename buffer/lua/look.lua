-- The figures of a table; changes nothing.
load_table(ARGV[1])
load_run()
return {'ok', view()}
