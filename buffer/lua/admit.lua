-- Grants groups to a generator: orphans first (they skip the gate, not the bound), then pending tasks.
-- ARGV: member, generation, incarnation and version it serves, wanted, u as the front knows it,
--       live_limit (demand below which the gate is open to this version), token of the stream
load_table(ARGV[1])
load_run()
local member, serving_inc, serving = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local wanted, live_limit = tonumber(ARGV[6]), tonumber(ARGV[8])
if generation_of(member) ~= tonumber(ARGV[3]) then return {'old_generation', view()} end
if replaced(member, ARGV[9]) then return {'replaced', view()} end
if serving_inc ~= R.incarnation then return {'other_incarnation', view()} end
if C.bounded == 1 and tonumber(ARGV[7]) ~= C.u then return {'moved', view()} end

if suspect() then return {'suspect', view()} end
local now = now_ms()
local grants, held, deadlines, admitted = {}, {}, {}, {}
local serving_pin = serving_inc .. ':' .. serving

local function grant(gid, g)
  if g.attempt > 0 then cancel(gid, g) end
  add('leases', 1)
  g.lease, g.former = 'a' .. C.leases, nil
  g.attempt, g.holder = g.attempt + 1, member
  local drafts = hand_out(gid, g)
  held[#held + 1] = gid
  deadlines[#deadlines + 1], deadlines[#deadlines + 2] = g.deadline, gid
  save_group(gid, g)
  grants[#grants + 1] = {gid, g.lease, g.attempt, g.ordinal, g.done, g.parent, drafts}
end

local function regrant(pin)
  for _, gid in ipairs(redis.call('ZRANGE', orphans_key(pin), 0, wanted - 1)) do
    if #grants >= wanted then return end
    local g = read_group(gid)
    g.grant = serving_pin
    g.deadline = deadline_of(g)
    if g.deadline >= C.u then
      redis.call('ZREM', orphans_key(pin), gid)
      add('orphaned', -1)
      add('readmissions', 1)
      grant(gid, g)
    end
  end
end

-- Why nothing more may be admitted, or nil.
local function closed(reserve)
  if C.bounded == 0 then return nil end
  if demand() + C.samples_per_insert - 1 >= live_limit then return 'gate' end
  if C.bytes + C.reserved + reserve > C.max_bytes then return 'bytes' end
  return nil
end

local reason = ''
local function admit(pin)
  if #grants >= wanted then return end
  local taken = {}
  for _, entry in ipairs(redis.call('ZRANGE', pending_key(pin), 0, wanted - #grants - 1)) do
    local ordinal, n, _, reserve, task, parent, refills = unpack(cjson.decode(entry))
    reason = closed(reserve) or ''
    if reason ~= '' then break end
    taken[#taken + 1] = entry
    add('seq', 1)
    add('pending', -1)
    add('first_admissions', 1)
    add('admitted', 1)
    add('generating', 1)
    add('reserved', reserve)
    local gid = ARGV[1] .. '-' .. C.seq
    local g = {
      state = 'generating', ordinal = ordinal, n = n, pin = pin, reserve = reserve, task = task, parent = parent,
      refills = refills, admitted_ms = now, done = string.rep('0', n), bytes = 0, payloads = '', tokens = 0, sealed_ms = 0,
      order = C.seq, ranges = '', attempt = 0, lost = 0, lease = '', holder = '', leased_ms = 0, grant = serving_pin,
      for_version = 0
    }
    g.deadline = deadline_of(g)
    admitted[#admitted + 1], admitted[#admitted + 2] = C.seq, gid
    grant(gid, g)
  end
  over('ZREM', pending_key(pin), taken)
end

regrant(serving_pin)
regrant('')
admit(serving_pin)
admit('')
over('ZADD', set_of('generating'), admitted)
over('SADD', held_by(member), held)
over('ZADD', T .. ':deadline', deadlines)
if #grants > 0 then redis.call('ZADD', T .. ':holders', 'NX', now + C.lease_ms, member) end
return {'ok', view(), grants, reason}
