-- Shared by `write` and `member_state`: the right to write a member, and the end of that right.
local function is_done(g, position) return string.sub(g.done, position, position) == '1' end

local function may_write(g, lease, attempt)
  return not g.payload_lost and g.attempt == tonumber(attempt) and (g.state ~= 'generating' or g.lease == lease)
end

-- True if an attempt has stored the member; with a digest, if it is that value.
local function has_stored(g, member, attempt, digest)
  local name = ',' .. member .. ':' .. attempt .. ':' .. (digest or '')
  return string.find(',' .. g.payloads .. ',', name, 1, true) ~= nil
end

-- True if no script can store a member under this attempt any more. Its group has ended (one that has not been admitted
-- yet may come), or has no such member. Or the attempt is over (attempts grow), or the member has its outcome.
local function is_over(gid, g, position, attempt)
  if not g then return number_of(gid) <= counters.seq end
  return position > g.n or tonumber(attempt) < g.attempt or is_done(g, position)
end
