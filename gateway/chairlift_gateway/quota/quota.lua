-- The quota law, in one script so that each operation is atomic. chairlift_gateway/quota/law.py says
-- the same in Python, with the reasons; a test holds the two together.
--
-- KEYS 1 account  2 leases  3 late (all three of one holder)  4 leasing  5 limits  6 idle
-- ARGV 1 operation  2 holder  3 the holder whose limits count where it has none  4... by operation
-- Levels are in units of 1/60000 token or request: a rate per minute times milliseconds, whole numbers.

local ACCOUNT, LEASES, LATE, LEASING, LIMITS, IDLE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local OPERATION, HOLDER, FALLBACK = ARGV[1], ARGV[2], ARGV[3]
local UNIT = 60000
local LATE_MS = 600000
local IDLE_MS = 3600000
local SWEPT_AT_ONCE = 1000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function whole(value) return string.format('%.0f', value) end

-- Limits -------------------------------------------------------------------------------------------

local text = redis.call('HGET', LIMITS, HOLDER) or redis.call('HGET', LIMITS, FALLBACK)
local is_read, limits = pcall(cjson.decode, text or '')
if not is_read or type(limits) ~= 'table' then text, limits = nil, {} end

local function bound(name)
  if type(limits[name]) == 'number' then return limits[name] end
end

local burst_ms = bound('burst_ms') or 30000
local borrows = limits.when_idle == 'borrow'

local function capacity(rate) return math.max(UNIT, rate * burst_ms) end

-- State --------------------------------------------------------------------------------------------

local state = redis.call('HMGET', ACCOUNT, 'at', 'tokens', 'requests')
local at = tonumber(state[1]) or now

local function refilled(level, rate)
  if not rate then return nil end
  local full = capacity(rate)
  level = tonumber(level) or full
  return math.min(full, level + math.max(0, now - at) * rate)
end

local token_rate, request_rate = bound('tokens_per_minute'), bound('requests_per_minute')
local tokens, requests = refilled(state[2], token_rate), refilled(state[3], request_rate)
local used = 0

local function take(num_tokens)
  if not tokens then return end
  local full = capacity(token_rate)
  tokens = math.min(full, tokens - num_tokens * UNIT)
  if borrows then tokens = math.max(-full, tokens) end
end

local function field(id) return 'r:' .. id end

-- A reservation is its charge; 'x' before it: the lease expired, and the charge counts as used.
local function reservation(id)
  local value = redis.call('HGET', ACCOUNT, field(id))
  if not value then return 'none', 0 end
  if value == 's' then return 'settled', 0 end
  if string.sub(value, 1, 1) == 'x' then return 'expired', tonumber(string.sub(value, 2)) end
  return 'live', tonumber(value)
end

local function remember(id, value)
  redis.call('HSET', ACCOUNT, field(id), value)
  redis.call('ZADD', LATE, whole(now + LATE_MS), id)
end

local function forget(id)
  redis.call('HDEL', ACCOUNT, field(id))
  redis.call('ZREM', LATE, id)
end

local function lease(id, charge, lease_ms)
  redis.call('HSET', ACCOUNT, field(id), whole(charge))
  redis.call('ZADD', LEASES, whole(now + lease_ms), id)
end

local function sweep()
  local due = redis.call('ZRANGEBYSCORE', LEASES, '-inf', whole(now), 'LIMIT', 0, SWEPT_AT_ONCE)
  for _, id in ipairs(due) do
    local _, charge = reservation(id)
    redis.call('ZREM', LEASES, id)
    remember(id, 'x' .. whole(charge))
    used = used + charge
  end
  local stale = redis.call('ZRANGEBYSCORE', LATE, '-inf', whole(now), 'LIMIT', 0, SWEPT_AT_ONCE)
  for _, id in ipairs(stale) do forget(id) end
end

local function save()
  if used ~= 0 then redis.call('HINCRBY', ACCOUNT, 'used', whole(used)) end
  redis.call('HSET', ACCOUNT, 'at', whole(now))
  local ttl = IDLE_MS
  if tokens then
    redis.call('HSET', ACCOUNT, 'tokens', whole(tokens))
    -- A debt outlives the account's rest.
    if tokens < 0 and token_rate > 0 then ttl = ttl + math.ceil(-tokens / token_rate) end
  end
  if requests then redis.call('HSET', ACCOUNT, 'requests', whole(requests)) end
  -- A limit that comes back begins with a full bucket.
  if state[2] and not tokens then redis.call('HDEL', ACCOUNT, 'tokens') end
  if state[3] and not requests then redis.call('HDEL', ACCOUNT, 'requests') end
  redis.call('PEXPIRE', ACCOUNT, whole(ttl))
  redis.call('PEXPIRE', LEASES, whole(ttl))
  redis.call('PEXPIRE', LATE, whole(ttl))
end

-- When the sweeper must look at this holder, at the latest.
local function note_next()
  local next_ms
  for _, key in ipairs({LEASES, LATE}) do
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if first and (not next_ms or tonumber(first) < next_ms) then next_ms = tonumber(first) end
  end
  if next_ms then redis.call('ZADD', LEASING, whole(next_ms), HOLDER)
  else redis.call('ZREM', LEASING, HOLDER) end
end

local function in_tokens(level) return level and whole(math.floor(level / UNIT)) or '' end

local function reply(status, detail)
  return {status, detail, in_tokens(tokens), in_tokens(requests), redis.call('ZCARD', LEASES), text or ''}
end

-- Operations ---------------------------------------------------------------------------------------

local function wait_ms(level, needed, rate)
  if rate <= 0 then return UNIT end
  return math.ceil((needed - level) / rate)
end

local function refusal(cost)
  if bound('concurrency') and redis.call('ZCARD', LEASES) >= bound('concurrency') then
    return 'concurrency', 1000
  end
  if requests and (request_rate <= 0 or requests < UNIT) then
    return 'requests', wait_ms(requests, UNIT, request_rate)
  end
  local binds = tokens and not (borrows and redis.call('EXISTS', IDLE) == 1)
  if not binds then return nil end
  local needed = math.min(cost * UNIT, capacity(token_rate))
  if token_rate <= 0 or tokens < needed then return 'tokens', wait_ms(tokens, needed, token_rate) end
end

local function reserve(id, cost, lease_ms)
  if not text then return reply('unknown', '') end
  sweep()
  local kind, charge = reservation(id)
  if kind ~= 'none' then
    save()
    return reply(kind == 'live' and 'admitted' or 'gone', whole(charge))
  end
  local reason, retry_ms = refusal(cost)
  if reason then
    redis.call('HINCRBY', ACCOUNT, 'refused', 1)
    save()
    note_next()
    return reply(reason, whole(retry_ms))
  end
  charge = cost
  if tokens and borrows then
    charge = math.min(cost, math.max(0, math.floor((tokens + capacity(token_rate)) / UNIT)))
  end
  take(charge)
  if requests then requests = requests - UNIT end
  lease(id, charge, lease_ms)
  save()
  note_next()
  return reply('admitted', whole(charge))
end

local function settle(id, num_used, may_be_unknown)
  sweep()
  local kind, charge = reservation(id)
  local was_unknown = kind == 'none' and may_be_unknown
  if kind == 'settled' or (kind == 'none' and not was_unknown) then
    save()
    return reply('gone', '')
  end
  take(num_used - charge)
  used = used + num_used
  if kind == 'expired' then used = used - charge end
  redis.call('ZREM', LEASES, id)
  forget(id)
  if may_be_unknown then remember(id, 's') end
  save()
  note_next()
  return reply('settled', whole(charge))
end

local function renew(lease_ms)
  sweep()
  for index = 5, #ARGV, 3 do
    local id, charge, num_used = ARGV[index], tonumber(ARGV[index + 1]), tonumber(ARGV[index + 2])
    local kind, held = reservation(id)
    if kind ~= 'settled' then
      if kind == 'none' then held = 0 else charge = held end
      charge = math.max(charge, num_used)
      if kind == 'expired' then
        used = used - held
        forget(id)
      end
      take(charge - held)
      lease(id, charge, lease_ms)
    end
  end
  save()
  note_next()
  return reply('renewed', '')
end

if OPERATION == 'reserve' then return reserve(ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])) end
if OPERATION == 'settle' then return settle(ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1') end
if OPERATION == 'renew' then return renew(tonumber(ARGV[4])) end
sweep()
save()
note_next()
return reply('swept', '')
