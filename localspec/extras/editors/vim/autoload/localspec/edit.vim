" Lines changed as somebody says, shown as a diff before anything is taken.

let s:request = {}
let s:form = join(readfile(expand('<sfile>:p:h:h:h') .. '/prompts/edit'), "\n")

" Ask for lines `range[0]` to `range[1]` of this buffer to be changed. The old text is the prediction:
" what stays as it is is not written anew word by word.
function! localspec#edit#ask(range, instruction) abort
  if !empty(s:request)
    throw 'localspec: another edit is being written; :Localspec stop ends it'
  elseif !&modifiable
    throw 'localspec: this buffer cannot be changed'
  endif
  let old = getline(a:range[0], a:range[1])
  let edit = {'buffer': bufnr(), 'first': a:range[0], 'old': old, 'text': '', 'cut': 0, 'filetype': &filetype}
  let fenced = localspec#fenced(old)
  let fields = {'stream': v:true, 'temperature': 0, 'prediction': {'type': 'content', 'content': fenced},
        \ 'messages': [{'role': 'user', 'content': s:question(fenced, len(old), a:instruction)}],
        \ 'localspec': {'kind': 'edit'}}
  let request = localspec#http#ask('/v1/chat/completions', extend(fields, localspec#model()),
        \ function('s:came', [edit]), function('s:ended', [edit]))
  let s:request = request.live ? request : {}
  call localspec#note('edits')
endfunction

" Worded for small models, too, which else write only what they change: the number of lines comes before the
" change, and the change last.
function! s:question(fenced, number, instruction) abort
  let name = empty(expand('%')) ? '' : ' ' .. expand('%:t')
  let [text, this] = a:number == line('$') ? ['the file' .. name, 'file'] : ['a part of the file' .. name, 'part']
  let lines = a:number == 1 ? 'the one line' : printf('all %d lines', a:number)
  let wanted = a:instruction =~# '[.!?]$' ? a:instruction : a:instruction .. '.'
  return printf(s:form, text, a:fenced, lines, this, wanted)
endfunction

function! localspec#edit#stop() abort
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    let s:request = {}
    call localspec#note('')
  endif
endfunction

function! s:came(edit, event) abort
  call localspec#named(a:event)
  let a:edit.text ..= localspec#chat#text(a:event)
  let a:edit.cut = a:edit.cut || localspec#chat#cut(a:event)
  call localspec#note(printf('edits, %d lines', count(a:edit.text, "\n")))
endfunction

function! s:ended(edit, error) abort
  let s:request = {}
  call localspec#note('')
  if !empty(a:error)
    call localspec#failed(a:error)
    return localspec#say(a:error)
  elseif a:edit.cut
    return localspec#say('the answer did not fit: select fewer lines.')
  endif
  let new = s:ended_as(a:edit.old, localspec#edit#code(a:edit.text, a:edit.old))
  if new ==# a:edit.old
    return localspec#say('the answer changes nothing.')
  elseif empty(new)
    let said = trim(a:edit.text)
    return localspec#say(empty(said) || said =~# '^```' ? 'the answer is empty.' : 'the answer has no code: ' .. said)
  endif
  call localspec#view#idle({-> s:show(a:edit, new)})
endfunction

" The lines in an answer's code block. Without a block it is all of it where that is much like the old lines,
" and else none: prose is no text to put in their place.
function! localspec#edit#code(text, old) abort
  let lines = split(trim(a:text, "\r\n"), "\r\\=\n", 1)
  let opens = match(lines, '^\s*```')
  if opens < 0
    return s:alike(a:text, join(a:old, "\n")) ? lines : []
  endif
  let fence = matchstr(lines[opens], '`\+')
  let closes = match(lines, '^\s*' .. fence .. '`*\s*$', opens + 1)
  return lines[opens + 1 : closes < 0 ? -1 : closes - 1]
endfunction

" Whether most words and signs of either text are in the other.
function! s:alike(one, other) abort
  let [number, common, counts] = [0, 0, {}]
  for word in s:words(a:other)
    let counts[word] = get(counts, word) + 1
    let number += 1
  endfor
  for word in s:words(a:one)
    let number += 1
    if get(counts, word)
      let counts[word] -= 1
      let common += 1
    endif
  endfor
  return common && 10 * common >= 3 * number
endfunction

function! s:words(text) abort
  return map(split(trim(a:text), '\%(\w\+\|[^[:alnum:]_[:space:]]\)\zs\_s*'), {_, word -> trim(word)})
endfunction

" New lines with the carriage returns that the old ones end with: of a file that has them at some lines only,
" Vim takes them for text, and models leave them out.
function! s:ended_as(old, new) abort
  let ends = {}
  for line in a:old
    let ends[trim(line, "\r", 2)] = line
  endfor
  let most = 2 * len(filter(copy(a:old), {_, line -> line =~# '\r$'})) > len(a:old)
  return map(copy(a:new), {_, line -> get(ends, line, most ? line .. "\r" : line)})
endfunction

function! s:show(edit, new) abort
  tabnew
  let t:localspec_edit = a:edit
  call s:window('as it is', a:edit.old, a:edit.filetype)
  setlocal nomodifiable
  rightbelow vertical new
  call s:window('proposed: <CR> takes it, q drops it', a:new, a:edit.filetype)
  let t:localspec_new = bufnr()
endfunction

function! s:window(title, lines, filetype) abort
  setlocal buftype=nofile bufhidden=wipe noswapfile nobuflisted undolevels=-1
  call setline(1, a:lines)
  setlocal undolevels=-123456
  let &l:filetype = a:filetype
  let &l:statusline = ' ' .. a:title
  nnoremap <buffer> <silent> <CR> <Cmd>call localspec#edit#take()<CR>
  nnoremap <buffer> <silent> q <Cmd>call localspec#edit#drop()<CR>
  diffthis
endfunction

" Close the diff, also where it is all that is left open.
function! localspec#edit#drop() abort
  if tabpagenr('$') == 1
    tabnew
    tabprevious
  endif
  tabclose
endfunction

" Put the proposal, with what was changed in it by hand, in the place of the old lines.
function! localspec#edit#take() abort
  let edit = t:localspec_edit
  let first = s:found(edit)
  if !bufloaded(t:localspec_new)
    return localspec#say('nothing was taken: the proposal was closed.')
  elseif !bufloaded(edit.buffer)
    return localspec#say('nothing was taken: its buffer is closed.')
  elseif !getbufvar(edit.buffer, '&modifiable')
    return localspec#say('nothing was taken: its buffer cannot be changed.')
  elseif !first
    return localspec#say('nothing was taken: those lines have changed.')
  endif
  let new = getbufline(t:localspec_new, 1, '$')
  call localspec#edit#drop()
  let number = len(edit.old)
  let both = min([number, len(new)])
  call setbufline(edit.buffer, first, new[: both - 1])
  if len(new) > both
    call appendbufline(edit.buffer, first + both - 1, new[both :])
  elseif number > both
    call deletebufline(edit.buffer, first + both, first + number - 1)
  endif
endfunction

" Where the old lines are now: where they were, or the one other place where they stand; 0: nowhere.
function! s:found(edit) abort
  let number = len(a:edit.old)
  let lines = getbufline(a:edit.buffer, 1, '$')
  if lines[a:edit.first - 1 : a:edit.first + number - 2] ==# a:edit.old
    return a:edit.first
  endif
  let places = filter(range(len(lines)), {_, at -> lines[at] ==# a:edit.old[0] && lines[at : at + number - 1] ==# a:edit.old})
  return len(places) == 1 ? places[0] + 1 : 0
endfunction
