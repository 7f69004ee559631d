-- Prompts are keys in other slots. `digest:ORDINAL` has the digest of each one in use. A prompt is in use while its
-- task is pending, its group lives, or its note keeps it. Ordinal and digest name the key, so that nothing can put
-- other bytes in its place. A learner of the past cannot, nor can one that gives an ordinal again after a loss.
-- (Keys, and no hash: below some hundred fields Redis walks through those of a hash one by one.)
local function digest_key(ordinal) return table_key .. ':digest:' .. ordinal end

-- Rows of an answer, which have an ordinal as their fourth item, with the name of its prompt there.
local function naming_prompts(rows)
  for first = 1, #rows, 1000 do
    local keys = {}
    for i = first, math.min(first + 999, #rows) do keys[#keys + 1] = digest_key(rows[i][4]) end
    for i, digest in ipairs(redis.call('MGET', unpack(keys))) do
      local row = rows[first + i - 1]
      row[4] = row[4] .. ':' .. (digest or '')
    end
  end
  return rows
end

-- The name of a prompt that is in use no more, as `trash` has it; nothing where none was seeded.
local function drop_prompt(ordinal)
  local digest = redis.call('GETDEL', digest_key(ordinal))
  return digest and ordinal .. ':' .. digest or ''
end
